"""A call from the router to a worker: its inputs, its outputs, and the meaning of its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shapeshift.engines.interfaces import Array, Ids
from shapeshift.errors import EngineError, ModelError, ShapeshiftError
from shapeshift.polymorph.worker import INPUTS, STATE
from shapeshift.serving import bls
from shapeshift.serving.pb_utils import PbUtils


class WrongBinError(ShapeshiftError):
    """The worker has a shorter bin than the router believed."""


class WorkerInfo(NamedTuple):
    """What a worker reports of itself: its bin (0: any length), generation and process number."""

    bin: int
    generation: int
    pid: int


class WorkerClient:
    """Calls workers by their model names, from any thread. A call blocks until the worker answers."""

    def __init__(self, pb_utils: PbUtils, outputs: Sequence[str]) -> None:
        self._pb_utils = pb_utils
        self._outputs = list(outputs)

    def call(self, worker: str, texts: Sequence[Ids]) -> tuple[dict[str, Array], WorkerInfo]:
        """The outputs for `texts`, each [len(texts), ...], and the worker's report.

        Raises ModelGoneError, ModelDiedError, WrongBinError, or EngineError for any other failure.
        """
        ids = np.concatenate(texts) if texts else np.zeros(0, np.int64)
        lengths = np.array([len(text) for text in texts], dtype=np.int32)
        inputs = dict(zip(INPUTS, (ids, lengths), strict=True))
        try:
            outputs = bls.call(self._pb_utils, worker, inputs, [*self._outputs, STATE])
        except ModelError as error:
            raise (WrongBinError if error.code == "UNSUPPORTED" else EngineError)(str(error)) from None
        info = WorkerInfo(*(int(value) for value in outputs.pop(STATE)))
        if any(len(outputs[name]) != len(texts) for name in self._outputs):
            raise EngineError(f"{worker}: answered for a number of texts that is not {len(texts)}")
        return outputs, info
