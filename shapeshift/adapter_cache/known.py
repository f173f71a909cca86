"""The adapters that the cache knows of, resident or not."""

from __future__ import annotations

import threading
import time

from shapeshift.adapter_cache.record import LOADING, Adapter

_LINGER_S = 5.0
"""Seconds that a withdrawn adapter is still known, for requests that have just been given it."""


class Known:
    """Adapters by name and by number, and how many requests wait for each. Any thread, except where it says otherwise.

    by_name  all of them
    waiting  names of those that requests wait for, who came first first
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Adapter] = {}
        self.waiting: dict[str, int] = {}
        self._by_number: dict[int, Adapter] = {}
        self._withdrawn: dict[str, tuple[Adapter, float]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Adapter:
        return self.by_name[name]

    def numbered(self, number: int) -> Adapter:
        """The adapter that bears `number`."""
        return self._by_number[number]

    def all(self) -> list[Adapter]:
        """Every one."""
        return list(self.by_name.values())

    def add(self, adapter: Adapter) -> None:
        """`adapter` may be asked for from now on."""
        self._by_number[adapter.number] = adapter
        self.by_name[adapter.name] = adapter

    def withdraw(self, adapter: Adapter) -> None:
        """No further request will ask for `adapter`."""
        self._withdrawn[adapter.name] = adapter, time.monotonic() + _LINGER_S

    def queued(self, name: str) -> None:
        """One more request waits for `name`."""
        with self._lock:
            self.waiting[name] = self.waiting.get(name, 0) + 1

    def unqueued(self, name: str) -> None:
        """One less."""
        with self._lock:
            self.waiting[name] -= 1
            if not self.waiting[name]:
                del self.waiting[name]

    def waited_for(self) -> list[Adapter]:
        """The adapters that requests wait for, who came first first."""
        with self._lock:
            return [self.by_name[name] for name in self.waiting]

    def outdated(self) -> list[Adapter]:
        """Withdrawn adapters that nobody uses, waits for or loads; the generating thread.

        Those that have been so for a while are forgotten: the caller drops them.
        """
        with self._lock:
            found = [
                (one, until)
                for one, until in self._withdrawn.values()
                if one.name not in self.waiting and not one.users and one.state != LOADING
            ]
        for one, until in found:
            if time.monotonic() > until:
                del self._withdrawn[one.name], self._by_number[one.number]
                self.by_name.pop(one.name)
        return [one for one, _ in found]
