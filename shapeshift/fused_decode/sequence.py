"""One request on its way: its prompt, what it asked for, and its answer so far."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.detokenize import TextStream

Ids = npt.NDArray[np.int64]

STOP, LENGTH, ABORT, DEADLINE = "stop", "length", "abort", "deadline"
"""Why an answer ended: the model or a stop string; a limit; a stop_id; its latency_ms."""
NO_ADAPTER = -1


@dataclass(frozen=True)
class GenerateParameters:
    """How tokens are chosen and when the answer ends; the names and meanings are vLLM's.

    max_tokens          most tokens of the answer
    temperature         0: always the likeliest token
    top_k               only so many of the likeliest tokens; 0 or -1: all
    top_p               only the likeliest tokens that together have this probability
    min_p               only tokens at least so likely, as a share of the likeliest one's probability
    repetition_penalty  above 1: tokens that stand in the prompt or the answer become less likely
    seed                of the draws; None: another one each time
    stop                texts that end the answer and are not part of it
    ignore_eos          whether the answer goes on after an end-of-sequence token
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Sequence:
    """One request in the decode loop.

    kept        tokens of its answer from before it was set aside, INT32 [n]
    adapter_id  what `StepBatch.adapters` holds for its rows; set before it gets a slot

    The generating thread writes; others may read. `parts` and `generated` only grow, and neither changes once
    `ended` is true: who reads `ended` first misses nothing.
    """

    __slots__ = (
        *("id", "prompt", "kept", "parameters", "stream", "outlet", "text", "limit", "deadline"),
        *("adapter_id", "slot", "generated", "parts", "finish", "error", "ended"),
        *("arrived", "admitted", "first_token", "finished"),
    )

    def __init__(
        self,
        name: str,
        prompt: Ids,
        parameters: GenerateParameters,
        text: TextStream,
        *,
        max_length: int,
        stream: bool = False,
        latency_ms: float | None = None,
        outlet: Any = None,
    ) -> None:
        self.id = name
        self.prompt = prompt
        self.kept: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.parameters = parameters
        self.stream = stream
        self.outlet = outlet
        self.text = text
        self.limit = min(parameters.max_tokens, max_length - len(prompt))
        self.arrived = time.monotonic()
        self.deadline = None if latency_ms is None else self.arrived + latency_ms / 1e3
        self.adapter_id = NO_ADAPTER
        self.slot: int | None = None
        self.generated = 0
        self.parts: list[str] = []
        self.finish: str | None = None
        self.error: Exception | None = None
        self.ended = False
        self.admitted = self.first_token = self.finished = 0.0

    def close(self, why: str | Exception) -> None:
        """End the answer with a finish reason or an error; its text is complete then."""
        self.slot = None
        if isinstance(why, Exception):
            self.error = why
        else:
            self.finish = why
            if rest := self.text.end():
                self.parts.append(rest)
        self.finished = time.monotonic()
        self.ended = True

    @property
    def tokens(self) -> int:
        """Tokens that the request may come to."""
        return len(self.prompt) + self.limit

    def timings_ms(self) -> dict[str, float]:
        """Where the time of an ended request went: waiting for a slot, reading the prompt, generating."""
        admitted = self.admitted or self.finished
        first = self.first_token or self.finished
        spans = {"queue_ms": (self.arrived, admitted), "prefill_ms": (admitted, first)}
        return {
            name: (end - start) * 1e3 for name, (start, end) in {**spans, "decode_ms": (first, self.finished)}.items()
        }
