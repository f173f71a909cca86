"""How the calls of a router reach its workers: what a transport does, and what a call and its answer hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from shapeshift.engines.interfaces import Array, Ids
from shapeshift.errors import EngineError, ModelError, ModelGoneError, ShapeshiftError
from shapeshift.polymorph.worker import INPUTS, STATE

Outputs = dict[str, Array]


class WrongBinError(ShapeshiftError):
    """The worker has a shorter bin than the router believed."""


class OtherVersionError(ShapeshiftError):
    """The worker's answers cannot be mixed with those of the front's other workers."""


class WorkerInfo(NamedTuple):
    """What a worker reports of itself with every answer, as its output STATE.

    bin: longest text that it takes, 0: any; generation: loads that replaced a dead process; pid: its process number;
    call_us: microseconds that this call took in the worker; busy_us: those of all calls of this process, whoever made
    them; version: see `Manifest.answers_version`.
    """

    bin: int
    generation: int
    pid: int
    call_us: int = 0
    busy_us: int = 0
    version: int = 0


@dataclass(frozen=True, eq=False)
class Exchange:
    """One call to a worker, and what the router wants to hear of it. The functions are called without a lock.

    worker    the name under which the transport offers it
    deadline  monotonic seconds
    begin     called once, when the call begins: the texts to send, none for a probe; None if there is no need any more
    answered  takes the outputs, each [texts, ...], and the milliseconds that the call took; also of a late answer
    ended     called exactly once: with the worker's report, None where `begin` returned None, or the error:
              CallTimeoutError at the deadline, ModelGoneError, ModelDiedError, WrongBinError, OtherVersionError,
              EngineError for any other failure
    """

    worker: str
    deadline: float
    begin: Callable[[], Sequence[Ids] | None]
    answered: Callable[[Outputs, float], None]
    ended: Callable[[WorkerInfo | Exception | None], None]


class Transport(Protocol):
    """Carries calls to workers. Thread-safe."""

    def workers(self) -> Sequence[str]:
        """The workers that may have joined: asked again and again, answers at once."""

    def serve(self) -> None:
        """The server gives this process requests, so it has it in service: called with each of them."""

    def start(self, exchange: Exchange) -> None:
        """Begin a call, without waiting for it. Raises OverloadedError where the transport is closed."""

    def is_exhausted(self, worker: str) -> bool:
        """Whether so many calls to the worker have not returned that it takes no more."""

    @property
    def timeouts(self) -> int:
        """Calls that ended at their deadline, in all."""

    def close(self, timeout_s: float) -> None:
        """End every call: those in flight may take `timeout_s`."""


def request_of(texts: Sequence[Ids]) -> dict[str, Array]:
    """The inputs of a call."""
    ids = np.concatenate(texts) if texts else np.zeros(0, np.int64)
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    return dict(zip(INPUTS, (ids, lengths), strict=True))


def read_answer(worker: str, answer: Mapping[str, Array], texts: int) -> tuple[Outputs, WorkerInfo]:
    """The outputs and the report of an answer. Raises OtherVersionError for an older report, or EngineError."""
    outputs = dict(answer)
    state = outputs.pop(STATE).tolist()
    # A newer version appends to its report.
    numbers = len(WorkerInfo._fields)
    if len(state) < numbers:
        raise OtherVersionError(f"its STATE has {len(state)} numbers, not {numbers}: it is of an older Shapeshift")
    require_texts(worker, outputs, texts)
    return outputs, WorkerInfo(*state[:numbers])


def require_texts(worker: str, outputs: Outputs, texts: int) -> None:
    """Raise EngineError unless the outputs of a worker are those of `texts` texts."""
    if any(len(values) != texts for values in outputs.values()):
        raise EngineError(f"{worker}: answered for a number of texts that is not {texts}")


def of_other_engines() -> OtherVersionError:
    """What ends a call to a worker whose engines do not give the answers of the front's own."""
    return OtherVersionError("its engines are not those of this front: other checkpoint, provider or precision")


def meaning(refused: ModelError) -> ShapeshiftError:
    """What the refusal of a call means to a router. A server that goes away answers that it is not available."""
    kinds: dict[str, type[ShapeshiftError]] = {"UNSUPPORTED": WrongBinError, "UNAVAILABLE": ModelGoneError}
    return kinds.get(refused.code, EngineError)(str(refused))
