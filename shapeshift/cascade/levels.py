"""Calls to the later levels, which are models of the same server, and what their errors mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shapeshift.cascade.control import Level
from shapeshift.cascade.softmax import Array
from shapeshift.errors import EngineError, InvalidInputError, OverloadedError, ShapeshiftError

ENGINE_MS = "ENGINE_MS"
# What this server says of a model that is not there, or whose process has died, in lower case.
_GONE = (
    "not ready",
    "not found",
    "no version is available",
    "is unavailable",
    "being unloaded",
    "not healthy",
    "stub process",
)
_REFUSED = ("INVALID_ARG", "UNSUPPORTED")


class LevelGoneError(ShapeshiftError):
    """The level's model is not loaded or has died, or gave no answer in time."""


class Found(NamedTuple):
    """What a level found of each text, and how long its engines took for each where it says so, in ms."""

    rows: list[Level]
    engine_ms: Array | None


class LevelClient:
    """Calls models from any thread; a call blocks until it is answered."""

    def __init__(self, pb_utils: Any) -> None:
        self._pb_utils = pb_utils

    def call(
        self, model: str, texts: Sequence[Sequence[bytes]], outputs: Sequence[str], truncate: bool = False
    ) -> Found:
        """The outputs for so many texts, each one or a pair. `outputs` of LOGITS, IMPORTANCE, OFFSETS, EMBEDDING and
        ENGINE_MS; truncate: whether the model may cut them, a parameter that it is sent only then.

        Raises LevelGoneError, InvalidInputError where the model refuses a text, OverloadedError where it is full, or
        EngineError for any other failure.
        """
        pb = self._pb_utils
        tensors = [pb.Tensor("TEXT", _column([text[0] for text in texts]))]
        if len(texts[0]) > 1:
            tensors.append(pb.Tensor("TEXT_PAIR", _column([text[1] for text in texts])))
        parameters = {"parameters": {"truncate": True}} if truncate else {}
        request = pb.InferenceRequest(
            model_name=model, requested_output_names=list(outputs), inputs=tensors, **parameters
        )
        try:
            response = request.exec()
        except Exception as error:  # noqa: BLE001  the server has several kinds for what it cannot do now
            raise _meaning(str(error), None, pb) from None
        if response.has_error():
            raise _meaning(response.error().message(), response.error().code(), pb)
        # Copied: the memory is Triton's, and goes with the response.
        found = {tensor.name(): np.array(tensor.as_numpy()) for tensor in response.output_tensors()}
        if any(name not in found or len(found[name]) != len(texts) for name in outputs):
            raise EngineError(f"{model} answered without {', '.join(outputs)} for {len(texts)} texts")
        return Found([_row(found, index) for index in range(len(texts))], found.get(ENGINE_MS))


def _column(texts: Sequence[bytes]) -> Array:
    return np.array([[text] for text in texts], dtype=object)


def _row(found: dict[str, Array], index: int) -> Level:
    own = {name.lower(): values[index] for name, values in found.items() if name != ENGINE_MS}
    return Level(**own)


def _meaning(text: str, code: object, pb_utils: Any) -> ShapeshiftError:
    if any(sign in text.lower() for sign in _GONE):
        return LevelGoneError(text)
    if code is not None and code in [getattr(pb_utils.TritonError, name, None) for name in _REFUSED]:
        return InvalidInputError("TEXT", text, "what the level takes")
    if code is not None and code == getattr(pb_utils.TritonError, "UNAVAILABLE", None):
        return OverloadedError(text)
    return EngineError(text)
