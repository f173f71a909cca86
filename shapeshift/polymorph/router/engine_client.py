"""Calls to workers that Triton's own backends serve (`polymorph.engine_model`), which report nothing of themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shapeshift.engines.interfaces import Ids
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import ModelError, ModelGoneError
from shapeshift.polymorph.router.bls_transport import BlsTransport
from shapeshift.polymorph.router.engine_calls import PROBE, EngineCalls, without_texts
from shapeshift.polymorph.router.transport import Outputs, Transport, WorkerInfo, meaning
from shapeshift.serving import bls
from shapeshift.serving.model_args import Log
from shapeshift.serving.pb_utils import PbUtils


class EngineClient:
    """Calls workers of its server by their model names, from any thread. made: the engines.

    A worker's bin is the version that answers: a probe asks one after the other.
    """

    def __init__(self, pb_utils: PbUtils, made: Manifest) -> None:
        self._pb_utils = pb_utils
        self._calls = EngineCalls(made)

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


def open_transport(pb_utils: PbUtils, front: str, workers: Sequence[str], made: Manifest, log: Log) -> Transport:
    """The transport of a front whose workers Triton's own backends serve; see `bls_transport.open_transport`."""
    return BlsTransport(EngineClient(pb_utils, made), workers)
