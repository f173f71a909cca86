"""What the router knows of one worker, and the calls that are under way to it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from shapeshift.engines.request import Row
from shapeshift.polymorph.worker_client import State

# One call runs in the worker, one waits there for it to end.
LANES = 2
# After so many time-outs in a row the scheduler loads the worker anew.
DEAD_AFTER = 2
# A worker whose calls fail so often in a row gets none before it was asked for its state again.
FAILING_AFTER = 2
# A call that never returns costs its thread; a worker that has taken so many gets no further calls.
_MOST_LOST = 200
# A worker that does not answer is asked for its state less often, but at least this often.
_LONGEST_PAUSE_S = 1.5
_PAUSE_S = 0.9


@dataclass(eq=False)
class Flight:
    """One call: its rows, the time that it takes by the profile, when it is given up, and whether it was.

    stay: the worker's stay (see `Link`) in which it began.
    """

    rows: Sequence[Row]
    expected_ms: float
    deadline: float
    stay: int
    given_up: bool = False


@dataclass(eq=False)
class Link:
    """One worker as the router sees it; changed under the router's lock only.

    state: what it last said of itself, None before; joined: whether rows are given to it; stay: how often it
    has joined; since: when it last did; timeouts: in a row, since its last answer; failures: of calls
    with rows, in a row; hello: whether it shall be asked for its state; heard: when it last answered or was
    asked; lanes: threads that may call it; lost: threads whose calls were given up and have not returned.
    """

    name: str
    wake: threading.Condition
    state: State | None = None
    joined: bool = False
    stay: int = 0
    since: float = 0.0
    timeouts: int = 0
    failures: int = 0
    hello: bool = False
    heard: float = 0.0
    lanes: int = 0
    lost: int = 0
    flights: list[Flight] = field(default_factory=list)

    def to_be_asked(self, now: float) -> bool:
        """Whether it is time to ask for its state, which a call under way does not do anyway."""
        pause = min(max(_PAUSE_S, self.timeouts), _LONGEST_PAUSE_S)
        return not self.hello and not self.under_way() and self.lost < _MOST_LOST and now - self.heard > pause

    def under_way(self) -> list[Flight]:
        """Calls that are still waited for."""
        return [flight for flight in list(self.flights) if not flight.given_up]

    def expected_ms(self) -> float:
        """What the calls under way take, by the profile."""
        return sum(flight.expected_ms for flight in self.under_way())

    def overdue(self, now: float) -> list[Flight]:
        """Calls that should have been answered by now and were not given up yet."""
        return [flight for flight in self.under_way() if now > flight.deadline]
