"""What is loaded before anybody is admitted for it (Chameleon, section 4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from shapeshift.adapter_cache.known import Known
from shapeshift.adapter_cache.record import ABSENT, Adapter

_MOST = 2
"""Loads under way beyond which nothing is loaded ahead."""
_KEPT_SLOTS = 2
"""Slots that are left to requests."""


class Begin(Protocol):
    """Gives an adapter a place and begins to load it, see `cache.AdapterCache`; False where it cannot."""

    def __call__(self, one: Adapter, *, keep: int, fresh: bool, evict: bool, spare_waiting: bool) -> bool: ...


class LoadsAhead:
    """Pinned adapters, those that requests wait for, and those that may be asked for, in this order.

    `pin` and `guess` may be called by any thread, `run` by the generating one.
    """

    def __init__(self, known: Known, begin: Begin) -> None:
        self._known = known
        self._begin = begin
        self._pinned: tuple[Adapter, ...] = ()
        self._guesses: deque[str] = deque()

    def pin(self, adapters: Iterable[Adapter]) -> None:
        """These, and no others, are loaded now and stay."""
        chosen = tuple(adapters)
        for one in [*self._pinned, *chosen]:
            one.pinned = one in chosen
        self._pinned = chosen

    def guess(self, name: str) -> None:
        """`name` may be asked for soon: it is loaded if nothing has to go for it."""
        self._guesses.append(name)

    def run(self, under_way: int) -> None:
        """Begin what there is room for, beside the loads that are under way."""
        left = _MOST - under_way
        for one in filter(_absent, self._pinned):
            if left <= 0 or not self._begin(one, keep=_KEPT_SLOTS, fresh=False, evict=True, spare_waiting=True):
                return
            left -= 1
        for one in filter(_absent, self._known.waited_for()):
            if left <= 0 or not self._begin(one, keep=_KEPT_SLOTS, fresh=True, evict=True, spare_waiting=True):
                return
            left -= 1
        while self._guesses and left > 0:
            guessed = self._known.by_name.get(self._guesses.popleft())
            if guessed is not None and _absent(guessed):
                left -= self._begin(guessed, keep=_KEPT_SLOTS, fresh=False, evict=False, spare_waiting=True)


def _absent(one: Adapter) -> bool:
    return one.state == ABSENT and one.error is None
