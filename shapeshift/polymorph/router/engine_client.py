"""Calls to workers that Triton's own backends serve (`polymorph.engine_model`), which report nothing of themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from shapeshift.engines.execution.engine_set import cost_curve, pack, unpack
from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import ModelError, ModelGoneError
from shapeshift.polymorph import engine_model
from shapeshift.polymorph.router.bls_transport import BlsTransport
from shapeshift.polymorph.router.transport import (
    Outputs,
    Transport,
    WorkerInfo,
    WrongBinError,
    meaning,
    require_texts,
)
from shapeshift.polymorph.service_times import bin_edges, entry_of_bin
from shapeshift.serving import bls
from shapeshift.serving.model_args import Log
from shapeshift.serving.pb_utils import PbUtils

PROBE = (np.zeros(1, np.int64),)
"""The texts of a probe: a worker computes every request."""


class EngineCalls:
    """Pads packs to the engines of `manifest`, and knows each worker's bin as its last probe found it.

    outputs: the names of those to request; edges: by version of a worker, the bin that it is.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.outputs = [output.name for output in manifest.outputs]
        self._versions = {edge: engine_model.version_of(manifest, edge) for edge in bin_edges(manifest)}
        self.edges = {version: edge for edge, version in self._versions.items()}
        self._manifest = manifest
        self._answers_version = manifest.answers_version()
        self._times_ms = {
            edge: cost_curve(entry_of_bin(manifest, edge), manifest.max_tokens).tolist() for edge in bin_edges(manifest)
        }
        self._bins: dict[str, int] = {}

    def versions(self, worker: str) -> list[int]:
        """The versions that the worker may have, the one of its known bin first."""
        current = self._bins.get(worker, 0)
        return sorted(self.edges, key=lambda version: (self.edges[version] != current, version))

    def version_for(self, worker: str, texts: Sequence[Ids]) -> int:
        """The version that is to compute `texts`. Raises WrongBinError where they do not fit the known bin."""
        current = self._bins.get(worker, 0)
        if sum(map(len, texts)) > current:
            raise WrongBinError(f"{worker}: its bin is {current or 'not known'} now")
        return self._versions[current]

    def learn(self, worker: str, version: int) -> None:
        """A probe of the worker was answered by this version."""
        self._bins[worker] = self.edges[version]

    def inputs(self, version: int, texts: Sequence[Ids]) -> dict[str, Array]:
        """The inputs of a call."""
        entry = entry_of_bin(self._manifest, self.edges[version])
        tokens, rows = entry.tokens or sum(map(len, texts)), entry.rows or len(texts)
        return pack(texts, tokens, rows, self._manifest.position_offset, self._manifest.type_stride)

    def answer(
        self, worker: str, version: int, answer: Mapping[str, Array], texts: Sequence[Ids], took_us: int
    ) -> tuple[Outputs, WorkerInfo]:
        """The outputs, each [len(texts), ...], and what would be the worker's report. Raises EngineError.

        What the call took beyond the profile counts as waiting and as the way: nobody says how long it was computed.
        """
        outputs = unpack(answer, texts)
        require_texts(worker, outputs, len(texts))
        edge = self.edges[version]
        computed_us = min(took_us, int(self._times_ms[edge][sum(map(len, texts))] * 1e3))
        return outputs, WorkerInfo(edge, 0, 0, computed_us, 0, self._answers_version)


def without_texts(outputs: Outputs) -> Outputs:
    """The outputs of a probe as those of no text."""
    return {name: values[:0] for name, values in outputs.items()}


class EngineClient:
    """Calls workers of its server by their model names, from any thread. manifest: of the engines.

    A worker's bin is the version that answers: a probe asks one after the other.
    """

    def __init__(self, pb_utils: PbUtils, manifest: Manifest) -> None:
        self._pb_utils = pb_utils
        self._calls = EngineCalls(manifest)

    def call(self, worker: str, texts: Sequence[Ids]) -> tuple[Outputs, WorkerInfo]:
        """The outputs for `texts`, each [len(texts), ...], and what would be the worker's report.

        Raises the errors of `Exchange.ended`, but for CallTimeoutError.
        """
        if texts:
            return self._compute(worker, self._calls.version_for(worker, texts), texts)
        for version in self._calls.versions(worker):
            try:
                outputs, info = self._compute(worker, version, PROBE)
            except ModelGoneError:
                continue
            self._calls.learn(worker, version)
            return without_texts(outputs), info
        raise ModelGoneError(f"{worker}: no version of it is ready")

    def _compute(self, worker: str, version: int, texts: Sequence[Ids]) -> tuple[Outputs, WorkerInfo]:
        inputs = self._calls.inputs(version, texts)
        began = time.perf_counter_ns()
        try:
            answer = bls.call(self._pb_utils, worker, inputs, self._calls.outputs, version=version)
        except ModelError as error:
            raise meaning(error) from None
        return self._calls.answer(worker, version, answer, texts, (time.perf_counter_ns() - began) // 1000)


def open_transport(pb_utils: PbUtils, front: str, workers: Sequence[str], manifest: Manifest, log: Log) -> Transport:
    """The transport of a front whose workers Triton's own backends serve; see `bls_transport.open_transport`."""
    return BlsTransport(EngineClient(pb_utils, manifest).call, workers)
