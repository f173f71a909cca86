"""What a front is made of: model, admission and requests. A technique that builds on it brings a room of its own."""

from __future__ import annotations

from typing import Any

from shapeshift.fused_decode import loading
from shapeshift.fused_decode.admission import Admission, FirstComeFirstServed
from shapeshift.fused_decode.loop import DecodeLoop
from shapeshift.fused_decode.sequence import Sequence
from shapeshift.fused_decode.slots import Ground
from shapeshift.serving.log import Log
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.parameters import RequestParameters

# What HTTP clients can name a request with: this server's generate endpoints pass `id` on as a parameter.
# `forwarded` is set by the model that forwards, which wants the code of an error in its text.
OWN_PARAMETERS = ("id", "forwarded")


class Room:
    """A model whose requests are served in order of arrival.

    own_parameters       request parameters that it understands beyond those of every front
    sampling_parameters  which of them may stand in the input `sampling_parameters` too
    ground               see `slots.Ground`
    """

    own_parameters: tuple[str, ...] = OWN_PARAMETERS
    sampling_parameters: tuple[str, ...] = ()
    ground: Ground | None = None

    def __init__(self, args: ModelArgs, log: Log, load_runtime: loading.Load = loading.load_runtime) -> None:
        self.loaded = loading.load(args, log, load_runtime)

    def admission(self) -> Admission[Sequence]:
        """Who gets a slot; asked for once."""
        own = self.loaded.own
        return FirstComeFirstServed(own.queue_requests, own.queue_tokens)

    def sequence(self, given: RequestParameters, text: bytes, *arguments: Any, **named: Any) -> Sequence:
        """A request with these parameters and prompt, made as `Sequence` is; raises ShapeshiftError."""
        return Sequence(*arguments, **named)

    def exported(self) -> list[Metric]:
        """What it counts beside the front and the loop."""
        return []

    def open(self, loop: DecodeLoop) -> None:
        """The loop will start."""

    def forget(self, sequence: Sequence) -> None:
        """`sequence` was refused, or its last response was handed over; any thread."""

    def close(self) -> None:
        """The loop has ended."""
