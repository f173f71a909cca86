"""A request's answer as Triton gets it: one response, or one for whatever has gathered since the last."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from shapeshift.fused_decode.fields import GenerateFields
from shapeshift.fused_decode.sequence import Sequence

TEXT = "text_output"
FINAL_ONLY = ("finish_reason", "queue_ms", "prefill_ms", "decode_ms")


class Answer:
    """See `serving.streams.Outgoing`; reads what the generating thread writes into `sequence`.

    requested: outputs that the caller wants of those that the model has; error_response(pb_utils, error) makes the
    response to a caller whose request failed. On the sending thread, closing(answer) is
    called before the last response is sent and ended(answer) after it, lost(answer) where one could not be sent.
    """

    def __init__(
        self,
        pb_utils: Any,
        response_sender: Any,
        fields: GenerateFields,
        requested: Collection[str],
        error_response: Callable[[Any, Exception], Any],
        closing: Callable[[Answer], None],
        ended: Callable[[Answer], None],
        lost: Callable[[Answer], None],
    ) -> None:
        self.response_sender = response_sender
        self.sequence: Sequence
        self._pb_utils = pb_utils
        self._echo = fields.text if fields.echo else b""
        self._outputs = [TEXT, *sorted(fields.outputs)]
        self._requested = requested
        self._error_response = error_response
        self._closing = closing
        self._ended = ended
        self._lost = lost
        self._parts = 0
        self._tokens = 0

    def next_response(self) -> tuple[Any, bool] | None:
        sequence = self.sequence
        # Read first: once it is true, nothing is added any more.
        last = sequence.ended
        parts = sequence.parts[self._parts :]
        if not last and not parts:
            return None
        if last:
            self._closing(self)
        if sequence.error is not None and last:
            return self._error_response(self._pb_utils, sequence.error), True
        self._parts += len(parts)
        tokens = sequence.generated - self._tokens
        self._tokens += tokens
        values = self._values("".join(parts), tokens, last)
        tensors = [self._pb_utils.Tensor(name, values[name]) for name in self._outputs if name in values]
        return self._pb_utils.InferenceResponse(output_tensors=tensors), last

    def handed_over(self, last: bool) -> None:
        if last:
            self._ended(self)

    def broken(self) -> None:
        self._lost(self)

    def _values(self, text: str, tokens: int, last: bool) -> dict[str, Any]:
        sequence = self.sequence
        values: dict[str, Any] = {
            TEXT: np.array([self._echo + text.encode()], dtype=object),
            "request_id": np.array([sequence.id.encode()], dtype=object),
            "num_input_tokens": np.array([len(sequence.prompt)], np.uint32),
            "num_output_tokens": np.array([tokens], np.uint32),
        }
        if last:
            values["finish_reason"] = np.array([str(sequence.finish).encode()], dtype=object)
            values |= {name: np.array([value], np.float32) for name, value in sequence.timings_ms().items()}
        return {name: value for name, value in values.items() if name in self._requested}
