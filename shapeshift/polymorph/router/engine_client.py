"""Calls to workers that Triton's own backends serve (`polymorph.engine_model`), which report nothing of themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from shapeshift.engines.interfaces import Ids
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.text.packing import pack, unpack
from shapeshift.errors import ModelError, ModelGoneError
from shapeshift.polymorph.router.bls_transport import BlsTransport
from shapeshift.polymorph.router.transport import Outputs, Transport, WorkerInfo, WrongBinError, meaning
from shapeshift.polymorph.service_times import bin_edges, entry_of_bin
from shapeshift.serving import bls
from shapeshift.serving.model_args import Log
from shapeshift.serving.pb_utils import PbUtils

# What a probe sends: a worker computes every request.
_ONE_TOKEN = (np.zeros(1, np.int64),)


class EngineClient:
    """Calls workers by their model names, from any thread, and pads packs to their engines. made: the engines.

    A worker's bin is the version that answers: a probe asks one after the other, beginning with the last known one.
    """

    def __init__(self, pb_utils: PbUtils, made: Manifest) -> None:
        self._pb_utils = pb_utils
        self._made = made
        self._edges = bin_edges(made)
        self._outputs = [output.name for output in made.outputs]
        self._bins: dict[str, int] = {}

    def call(self, worker: str, texts: Sequence[Ids]) -> tuple[Outputs, WorkerInfo]:
        """The outputs for `texts`, each [len(texts), ...], and what would be the worker's report.

        Raises the errors of `Exchange.ended`, but for CallTimeoutError.
        """
        if texts:
            known = self._bins.get(worker, 0)
            if sum(map(len, texts)) > known:
                raise WrongBinError(f"{worker}: its bin is {known or 'not known'} now")
            return self._compute(worker, known, texts)
        known = self._bins.get(worker, 0)
        for edge in sorted(self._edges, key=lambda edge: (edge != known, edge)):
            try:
                outputs, info = self._compute(worker, edge, _ONE_TOKEN)
            except ModelGoneError:
                continue
            self._bins[worker] = edge
            return {name: values[:0] for name, values in outputs.items()}, info
        raise ModelGoneError(f"{worker}: no version of it is ready")

    def _compute(self, worker: str, edge: int, texts: Sequence[Ids]) -> tuple[Outputs, WorkerInfo]:
        entry = entry_of_bin(self._made, edge)
        tokens, rows = entry.tokens or sum(map(len, texts)), entry.rows or len(texts)
        inputs = pack(texts, tokens, rows, self._made.position_offset)
        began = time.perf_counter_ns()
        try:
            answer = bls.call(self._pb_utils, worker, inputs, self._outputs, version=edge)
        except ModelError as error:
            raise meaning(error) from None
        took_us = (time.perf_counter_ns() - began) // 1000
        # Nobody says for how long it waited there, so all of it counts as computed.
        return unpack(answer, texts), WorkerInfo(edge, 0, 0, took_us, 0, self._made.answers_version())


def open_transport(pb_utils: PbUtils, front: str, workers: Sequence[str], made: Manifest, log: Log) -> Transport:
    """The transport of a front whose workers Triton's own backends serve; see `bls_transport.open_transport`."""
    return BlsTransport(EngineClient(pb_utils, made), workers)
