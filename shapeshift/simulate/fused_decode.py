"""One decode loop as discrete events, under the admission and the compaction that serve, and its baselines (Flover).

The time of an iteration is a linear function of its work. A request has one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from shapeshift import settings
from shapeshift.errors import OverloadedError
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.policy.compact import compact
from shapeshift.settings import require
from shapeshift.simulate.events import Events, Progress
from shapeshift.simulate.outcome import Outcome, in_time, latencies, shares, timeliness
from shapeshift.workloads.trace import Trace

BATCHING, ROWS = ("fused", "window", "instances"), ("running", "contiguous", "compacted")
SERVED, REFUSED, LOST = range(3)
OUTCOMES = ("served", "refused", "lost")


@dataclass(frozen=True)
class DecodeMachine:
    """A simulated generator.

    slots           most running requests
    base_s, row_s, token_s  time of an iteration: constant, per row, and per prompt token
    prefill_tokens  most prompt tokens of an iteration
    batching        fused: requests join and leave between iterations; window: a batch begins `window_s` after its
                    first request, and its answers come when its longest ends; instances: each request has a model
                    instance of its own, and they take turns
    window_s        see there
    rows            which rows an iteration computes: running; contiguous: those from the first to the last running
                    slot; compacted: the same, after each end of a request compacted by Algorithm 3
    queue_requests  most requests that wait
    overhead_ms     time of each request beside wait and iterations: network, reading, answering
    kill_s, recovery_s  when the process dies, with all that it holds (0: never), and until it serves again
    """

    slots: int
    base_s: float
    row_s: float = 0.0
    token_s: float = 0.0
    prefill_tokens: int = 512
    batching: str = "fused"
    window_s: float = 0.5
    rows: str = "running"
    queue_requests: int = 10**6
    overhead_ms: float = 0.0
    kill_s: float = 0.0
    recovery_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("slots", "base_s", "prefill_tokens", "queue_requests"):
            require(0 < getattr(self, name) < np.inf, name, getattr(self, name), "above 0")
        for name in ("row_s", "token_s", "window_s", "overhead_ms", "kill_s", "recovery_s"):
            require(0 <= getattr(self, name) < np.inf, name, getattr(self, name), "0 or more")
        for name, allowed in (("batching", BATCHING), ("rows", ROWS)):
            require(getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(allowed)}")


@dataclass(frozen=True)
class SimulationResult:
    """What one run measured.

    first_s, last_s  seconds from arrival to the first and to the last token, by request; nan without an answer
    outcome     of each request, an index of OUTCOMES
    ended_s, tokens  of each iteration: when it ended, and the tokens that it gave
    launches    iterations of all model instances
    rows, moves  rows that were computed, and slots that Algorithm 3 copied
    """

    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    outcome: NDArray[np.uint8]
    ended_s: NDArray[np.float64]
    tokens: NDArray[np.int64]
    launches: int
    rows: int
    moves: int


class _Request:
    def __init__(self, index: int, arrived: float, prompt: int, answer: int, slo_class: str | None) -> None:
        self.index, self.arrived, self.slo_class = index, arrived, slo_class
        self.unread, self.left, self.answer = prompt, answer, answer
        self.slot = 0


def run(machine: DecodeMachine, trace: Trace, progress: Progress | None = None) -> SimulationResult:
    """Serve a trace, whose requests have an `output_length` each, to the end."""
    return _Loop(machine, trace).run(progress)


class _Loop:
    def __init__(self, machine: DecodeMachine, trace: Trace) -> None:
        self._machine, self._trace = machine, trace
        self._prompts, self._answers = trace.length.tolist(), trace.output_length.tolist()
        self._classes = trace.slo_class.tolist() if trace.has("slo_class") else None
        self._events = Events()
        self._admission: FirstComeFirstServed[_Request] = FirstComeFirstServed(machine.queue_requests)
        self._slots: list[_Request | None] = [None] * machine.slots
        self._running: dict[_Request, None] = {}
        self._iterates, self._lives = False, 1
        self._batch: list[_Request] = []
        self._launches = self._rows = self._moves = 0
        self._ended: list[float] = []
        self._tokens: list[int] = []
        count = len(trace)
        self._first, self._last = np.full(count, np.nan), np.full(count, np.nan)
        self._outcome = np.full(count, LOST, np.uint8)

    def run(self, progress: Progress | None) -> SimulationResult:
        if self._machine.kill_s:
            self._events.at(self._machine.kill_s, self._die)
        self._events.run(self._trace.at_s, self._arrive, progress)
        assert not len(self._admission) and not self._running, "requests are left"
        ended, tokens = np.array(self._ended), np.array(self._tokens, np.int64)
        arrays = (self._first, self._last, self._outcome, ended, tokens)
        return SimulationResult(*arrays, self._launches, self._rows, self._moves)

    def _arrive(self, index: int) -> None:
        slo_class = None if self._classes is None else self._classes[index]
        request = _Request(index, self._events.now, self._prompts[index], self._answers[index], slo_class)
        try:
            if not self._lives:
                raise OverloadedError("no process serves")
            if (displaced := self._admission.submit(request)) is not None:
                self._outcome[displaced.index] = REFUSED
        except OverloadedError:
            self._outcome[index] = REFUSED
            return
        if not self._iterates:
            self._begin()

    def _begin(self) -> None:
        self._iterates = True
        wait_s = self._machine.window_s if self._machine.batching == "window" else 0.0
        self._events.at(self._events.now + wait_s, self._iterate, self._lives)

    def _iterate(self, life: int) -> None:
        if life != self._lives:
            return
        # A batch of a window takes nobody in.
        if self._machine.batching != "window" or not self._running:
            for request in self._admission.admit(self._machine.slots - len(self._running)):
                self._place(request)
            self._batch = [*self._running]
        if not self._running:
            self._iterates = False
            return
        machine, budget = self._machine, self._machine.prefill_tokens
        decoding = [request for request in self._running if not request.unread]
        for request in [request for request in self._running if request.unread]:
            taken = min(budget, request.unread)
            request.unread -= taken
            budget -= taken
            if taken and not request.unread:
                decoding.append(request)
        rows = self._computed_rows()
        launches = len(self._running) if machine.batching == "instances" else 1
        self._rows += rows
        self._launches += launches
        prefilled = machine.prefill_tokens - budget
        took_s = launches * machine.base_s + rows * machine.row_s + prefilled * machine.token_s
        self._events.at(self._events.now + took_s, self._computed, (life, decoding))

    def _place(self, request: _Request) -> None:
        """The first free slot from the first running one on, so that no row is added where there is a hole."""
        first = next((slot for slot, owner in enumerate(self._slots) if owner is not None), 0)
        order = [*range(first, len(self._slots)), *range(first - 1, -1, -1)]
        request.slot = next(slot for slot in order if self._slots[slot] is None)
        self._slots[request.slot] = request
        self._running[request] = None

    def _computed_rows(self) -> int:
        if self._machine.batching == "window":
            return len(self._batch)
        if self._machine.rows == "running":
            return len(self._running)
        slots = [request.slot for request in self._running]
        return max(slots) - min(slots) + 1

    def _computed(self, ended: tuple[int, Sequence[_Request]]) -> None:
        life, decoding = ended
        if life != self._lives:
            return
        now = self._events.now
        self._ended.append(now)
        self._tokens.append(len(decoding))
        for request in decoding:
            if request.left == request.answer:
                self._first[request.index] = now - request.arrived
            request.left -= 1
        self._leave([request for request in decoding if not request.left])
        if self._running or self._machine.batching != "window":
            # What has arrived by now takes part in the next one.
            self._events.at(now, self._iterate, life)
        elif len(self._admission):
            self._begin()
        else:
            self._iterates = False

    def _leave(self, finished: Sequence[_Request]) -> None:
        now = self._events.now
        for request in finished:
            del self._running[request]
            self._slots[request.slot] = None
            self._admission.finished(request)
        if self._machine.batching == "window":
            finished = [] if self._running else self._batch
        for request in finished:
            self._last[request.index] = now - request.arrived
            self._outcome[request.index] = SERVED
        if finished and self._running and self._machine.rows == "compacted":
            self._compact()

    def _compact(self) -> None:
        moves = compact([float(owner is not None) for owner in self._slots]).moves
        self._moves += len(moves)
        for source, target in moves:
            owner = self._slots[source]
            assert owner is not None
            owner.slot, self._slots[target], self._slots[source] = target, owner, None

    def _die(self, _: None) -> None:
        """What waits and runs is lost."""
        self._lives = 0
        self._admission.close()
        lost = [request.index for request in self._batch if self._outcome[request.index] != SERVED]
        self._first[lost] = np.nan
        self._running.clear()
        self._slots = [None] * self._machine.slots
        self._events.at(self._events.now + self._machine.recovery_s, self._recover)

    def _recover(self, _: None) -> None:
        self._admission = FirstComeFirstServed(self._machine.queue_requests)
        self._lives, self._iterates = 2, False


@dataclass(frozen=True)
class DecodeSystem:
    """A generator of a scenario."""

    SETTINGS: ClassVar[Sequence[type]] = (DecodeMachine,)

    machine: DecodeMachine

    @classmethod
    def read(cls, values: Mapping[str, str]) -> DecodeSystem:
        """Raises InvalidInputError naming a field."""
        return cls(settings.read(DecodeMachine, values))

    def serve(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """See `scenario.System`."""
        require(bool((trace.output_length > 0).all()), "output_length", 0, "at least 1 of each request")
        result = run(self.machine, trace, progress)
        first_ms, last_ms = (times * 1e3 + self.machine.overhead_ms for times in (result.first_s, result.last_s))
        figures = {
            "requests": len(trace),
            **shares(result.outcome, OUTCOMES),
            **timeliness(in_time(first_ms, trace), trace),
            **latencies(first_ms, "first "),
            **latencies(last_ms, "last "),
            "tokens/s": float(result.tokens.sum() / (result.ended_s.max(initial=0.0) - trace.at_s[0] or 1.0)),
            "launches": result.launches,
            "rows a launch": result.rows / max(1, result.launches),
        }
        return Outcome(figures, first_ms)
