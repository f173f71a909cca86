"""How a request of the drill ended, and what one fault cost."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

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
    """What one fault cost. in_flight: requests that were open when it began; whole_s: see `recovery`.

    excused: lost requests that a killed process itself held.
    """

    in_flight: int
    counts: dict[str, int]
    excused: int
    whole_s: float
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def unexcused(self) -> int:
        """Lost requests that no killed process held."""
        return self.counts[LOST] - self.excused


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
