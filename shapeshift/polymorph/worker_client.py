"""The router's side of a call to a worker: what `worker` takes and answers, and what its errors mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shapeshift.engines.protocol import Array, Ids
from shapeshift.errors import EngineError, ShapeshiftError
from shapeshift.polymorph.worker import INPUTS, STATE


class WorkerGoneError(ShapeshiftError):
    """The worker's model is not loaded, or just being replaced: another worker can serve at once."""


class WorkerSickError(ShapeshiftError):
    """The worker's process has died; nothing will be served by it before it is loaded anew."""


class WrongBinError(ShapeshiftError):
    """The worker has another, shorter bin than the router believed."""


class State(NamedTuple):
    """What a worker says of itself: its bin (0: any length), generation and process number."""

    bin: int
    generation: int
    pid: int


# What this server's messages contain, in lower case.
_GONE = (
    "not ready",
    "bls is only supported",
    "not found",
    "is being unloaded",
    "no version is available",
    "is unavailable",
)
_SICK = ("not healthy", "unexpected termination", "stub process")


class WorkerClient:
    """Calls workers by their model names, from any thread; a call blocks until it is answered."""

    def __init__(self, pb_utils: Any, outputs: Sequence[str]) -> None:
        self._pb_utils = pb_utils
        self._outputs = list(outputs)

    def call(self, worker: str, texts: Sequence[Ids]) -> tuple[dict[str, Array], State]:
        """The outputs for `texts`, each [len(texts), ...], and the worker's state.

        Raises WorkerGoneError, WorkerSickError, WrongBinError, or EngineError for any other failure.
        """
        pb = self._pb_utils
        ids = np.concatenate(texts) if texts else np.zeros(0, np.int64)
        lengths = np.array([len(text) for text in texts], dtype=np.int32)
        tensors = [pb.Tensor(name, values) for name, values in zip(INPUTS, (ids, lengths), strict=True)]
        request = pb.InferenceRequest(model_name=worker, requested_output_names=[*self._outputs, STATE], inputs=tensors)
        try:
            response = request.exec()
        except Exception as error:  # noqa: BLE001  the server has several kinds for what it cannot do now
            raise _meaning(str(error), None, pb) from None
        if response.has_error():
            raise _meaning(response.error().message(), response.error().code(), pb)
        # Copied: the memory is Triton's, and goes with the response.
        found = {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}
        state = State(*(int(value) for value in found.pop(STATE)))
        if any(len(found[name]) != len(texts) for name in self._outputs):
            raise EngineError(f"{worker} answered for another number of texts than {len(texts)}")
        return found, state


def _meaning(text: str, code: object, pb_utils: Any) -> ShapeshiftError:
    low = text.lower()
    if code == pb_utils.TritonError.UNSUPPORTED:
        return WrongBinError(text)
    if any(sign in low for sign in _SICK):
        return WorkerSickError(text)
    if any(sign in low for sign in _GONE):
        return WorkerGoneError(text)
    return EngineError(text)
