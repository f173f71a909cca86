"""What a front gives to, and gets from, the forwarding of its fleet. Outside a fleet nothing stands in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shapeshift.serving.description import Describe
from shapeshift.serving.front import fleet_file
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Metric
from shapeshift.serving.model_args import Log, ModelArgs
from shapeshift.serving.pb_utils import InferenceRequest, PbUtils
from shapeshift.serving.responses import Responder, Submit
from shapeshift.settings import Choices


@dataclass(frozen=True)
class Affinity:
    """What a node should have in memory for a request, and how long it takes to its first token.

    key            what a request should find in memory, such as its adapter; empty: nothing
    prompt_tokens  of a request, before it is parsed: about how many
    unread_tokens  prompt tokens of the requests here that have no first token yet. Any thread
    """

    key: Callable[[InferenceRequest], str]
    prompt_tokens: Callable[[InferenceRequest], float]
    unread_tokens: Callable[[], float]


@dataclass(frozen=True)
class Front:
    """A front that any node of a fleet may serve the requests of.

    serve      serves a request here; raises, or answers, for one that is invalid
    describe   what the front is
    load       requests, or rows of them, that wait or run here
    affinity   None: any node is as good for any request
    stream     whether a request gets several responses
    stop_id    name of the input with the id of a request that is to end; empty: there is none
    id_output  name of the output with the id of the request; empty: there is none
    """

    pb_utils: PbUtils
    args: ModelArgs
    responder: Responder
    log: Log
    serve: Submit
    describe: Describe
    load: Callable[[], float]
    affinity: Affinity | None = None
    stream: bool = False
    stop_id: str = ""
    id_output: str = ""


class Entry(Protocol):
    """Where the requests of a front enter. metrics, steps: to be exported, and watched, by the front."""

    submit: Submit
    describe: Describe
    metrics: Sequence[Metric]
    steps: Sequence[StepCounter]

    def close(self) -> None:
        """Answer what is in flight, and stop."""
        ...


class LocalEntry:
    """The entry of a front outside a fleet: every request is served here."""

    metrics: Sequence[Metric] = ()
    steps: Sequence[StepCounter] = ()

    def __init__(self, front: Front) -> None:
        self.submit = front.serve
        self.describe = front.describe

    def close(self) -> None:
        """Nothing is held."""


# Imported when chosen: a server outside a fleet calls no other one.
ENTRIES: Choices[Callable[[Front], Entry]] = Choices(
    "fleet",
    {
        "fleet": "shapeshift.fleet.forwarding.entry:FleetEntry",
        "server": "shapeshift.fleet.forwarding.front:LocalEntry",
    },
)


def open_entry(front: Front) -> Entry:
    """The entry of `front`. Raises ShapeshiftError for a fleet file that cannot be read."""
    return ENTRIES["fleet" if fleet_file() else "server"](front)
