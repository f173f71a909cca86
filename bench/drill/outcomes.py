"""How a request of the drill ended, what one fault cost, and when all is whole after it.

Whole: the requests are answered as they were before the fault.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

RIGHT = "right"
CODED = "coded"
"""Refused with a code that tells the client what to do."""
CUT = "cut"
"""The connection ended: the client knows at once that there will be no answer."""
INTERNAL = "internal"
"""An error without a code of its own."""
LOST = "lost"
"""No answer within the time-out, or one that ended without its last part."""
WRONG = "wrong"
KINDS = (RIGHT, CODED, CUT, INTERNAL, LOST, WRONG)

_CODES = frozenset(
    {
        *("INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "UNIMPLEMENTED", "CANCELLED"),
        *("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
    }
)
# Parts of the texts with which the client's own gRPC says that the connection has ended.
_CONNECTION = ("failed to connect", "socket closed", "connection re", "broken pipe", "goaway", "recvmsg", "channel is")
_CODE_IN_TEXT = re.compile(r"\[([A-Z_]+)\] ")
SLOWER = 2.0
"""The p99 within this factor of that before the fault is whole."""
WINDOW_S = 2.0
HOLD_S = 2.0
"""For so long every window must be whole."""
_STEP_S = 0.1
_LEAST = 10
_NOT_LOADED = ("unknown model", "is not ready", "no available versions")


@dataclass(frozen=True)
class Outcome:
    """One request: its front, how it ended, and when, in monotonic seconds.

    done_s: when the answer was there, or when it was given up. extra: one of a burst, which tells nothing about
    latency. text: of the error.
    """

    front: str
    kind: str
    intended_s: float
    sent_s: float
    done_s: float
    text: str = ""
    extra: bool = False

    @property
    def latency_s(self) -> float:
        """From the intended instant to the right answer; infinite where there is none."""
        return self.done_s - self.intended_s if self.kind == RIGHT else math.inf


def kind_of_error(code: str, text: str, took_s: float, timeout_s: float) -> str:
    """The kind of a call that gRPC ended with `code` after `took_s` seconds."""
    if code == "DEADLINE_EXCEEDED" and took_s >= 0.9 * timeout_s:
        return LOST
    if code == "UNAVAILABLE" and any(part in text.lower() for part in _CONNECTION):
        return CUT
    return CODED if code in _CODES else INTERNAL


def kind_of_refusal(text: str) -> str:
    """The kind of an error that came as a message of a stream.

    A front of ours puts its code into the text; Triton itself refuses a model that is not loaded without one.
    """
    if (match := _CODE_IN_TEXT.match(text)) is not None:
        return INTERNAL if match[1] == INTERNAL.upper() else CODED
    return CODED if any(part in text.lower() for part in _NOT_LOADED) else INTERNAL


@dataclass(frozen=True)
class Cost:
    """What one fault cost. in_flight: requests that were open when it began; whole_s: see `time_until_whole`.

    excused: lost requests that a killed process itself held.
    """

    in_flight: int
    counts: dict[str, int]
    excused: int
    whole_s: float
    errors: dict[str, int] = field(default_factory=dict)

    def missed(self, within_s: float) -> Iterator[str]:
        """A line for each gate that is missed. within_s: by when all must be whole."""
        if self.counts[WRONG]:
            yield f"{self.counts[WRONG]} wrong answers"
        if unexcused := self.counts[LOST] - self.excused:
            yield f"{unexcused} requests lost that no killed process held"
        if self.whole_s > within_s:
            yield f"whole after {self.whole_s:.1f} s, the bound is {within_s:g} s"


def cost(outcomes: Sequence[Outcome], began_s: float, holders: Collection[str], held_s: float, whole_s: float) -> Cost:
    """The cost of a fault that began at `began_s`, from the requests that ended after that.

    holders: fronts whose requests the killed processes held; held_s: until when after `began_s` these took requests.
    """
    after = [one for one in outcomes if one.done_s >= began_s]
    counts = Counter(one.kind for one in after)
    excused = sum(one.kind == LOST and one.front in holders and one.sent_s <= began_s + held_s for one in after)
    errors = Counter(
        f"{one.front}: {one.kind}: {one.text}" for one in after if one.kind not in (RIGHT, CUT) and not one.extra
    )
    return Cost(
        in_flight=sum(one.sent_s < began_s for one in after),
        counts={kind: counts[kind] for kind in KINDS},
        excused=excused,
        whole_s=whole_s,
        errors=dict(errors.most_common()),
    )


def p99_by_front(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The 99th percentile of the latency of each front's right answers, in seconds."""
    latencies: dict[str, list[float]] = defaultdict(list)
    for one in outcomes:
        if one.kind == RIGHT and not one.extra:
            latencies[one.front].append(one.latency_s)
    return {front: float(np.percentile(values, 99)) for front, values in latencies.items()}


def is_whole(window: Sequence[Outcome], before: Mapping[str, float]) -> bool:
    """Whether the p99 of latency over its front's p99 before is at most SLOWER, and every front had a right answer.

    A request without a right answer counts as infinitely late. A window of fewer than 10 requests tells nothing.
    """
    if len(window) < _LEAST:
        return False
    fronts = {one.front for one in window}
    if fronts - {one.front for one in window if one.kind == RIGHT}:
        return False
    slower = np.array([one.latency_s / before.get(one.front, math.inf) for one in window])
    return float(np.percentile(slower, 99, method="lower")) <= SLOWER


def time_until_whole(outcomes: Iterable[Outcome], began_s: float, ended_s: float, before: Mapping[str, float]) -> float:
    """Seconds from `began_s` to the first instant from which, for HOLD_S, every window of WINDOW_S is whole.

    A window holds the requests by their intended instants. Infinite where there is no such instant before `ended_s`.
    """
    sent = sorted((one for one in outcomes if not one.extra), key=lambda one: one.intended_s)
    instants = [one.intended_s for one in sent]

    def whole_from(start: float) -> bool:
        first, last = bisect_left(instants, start), bisect_left(instants, start + WINDOW_S)
        return is_whole(sent[first:last], before)

    needed = round(HOLD_S / _STEP_S) + 1
    held = 0
    for step in range(math.floor((ended_s - WINDOW_S - began_s) / _STEP_S) + 1):
        held = held + 1 if whole_from(began_s + step * _STEP_S) else 0
        if held == needed:
            return (step + 1 - needed) * _STEP_S
    return math.inf
