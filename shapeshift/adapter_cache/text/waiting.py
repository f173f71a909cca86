"""Requests for texts that wait until their adapter is in memory, where it stays until they are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shapeshift.adapter_cache.memory.adapter_table import Adapter
from shapeshift.adapter_cache.memory.cache import AdapterCache
from shapeshift.engines.execution.request import TextRequest
from shapeshift.serving.bounds import Bound, unloading

# Requests that may overtake the first one while those that run leave no room for its adapter.
_MOST_OVERTAKES = 32


class WaitingTexts:
    """Hands requests to `submit` when their adapters are ready, in order of arrival; a load blocks no other request.

    Where adapters in use leave no room for that of the first one, at most _MOST_OVERTAKES requests overtake it.
    Any thread calls it; it calls the cache with its lock held, so that threads take turns as the cache's one.
    """

    def __init__(self, submit: Callable[[TextRequest], None], most_rows: int) -> None:
        """submit: may raise what the request is answered then; most_rows: texts that may wait."""
        self.cache: AdapterCache
        self._submit = submit
        self._bound = Bound("queue_rows", most_rows, "rows")
        self._waiting: dict[TextRequest, None] = {}
        self._using: set[TextRequest] = set()
        self._first: TextRequest | None = None
        self._overtakes = 0
        self._closed = False
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return sum(len(request.rows) for request in list(self._waiting))

    @property
    def labels(self) -> tuple[set[str], set[str]]:
        """The adapters that requests use, and those that they wait for."""
        with self._lock:
            return {one.adapter.label for one in self._using}, {one.adapter.label for one in self._waiting}

    def add(self, request: TextRequest) -> None:
        """Have `request`, which has an adapter, submitted. Raises OverloadedError where too many wait."""
        with self._lock:
            if self._closed:
                raise unloading()
            self._bound.require_unless_empty(len(self), len(request.rows))
            self._waiting[request] = None
            self.cache.queued(request.adapter.name)
        self.advance()

    def release(self, request: TextRequest) -> None:
        """`request` has been answered."""
        with self._lock:
            if request in self._using:
                self._using.remove(request)
                self.cache.release(request.adapter.name)
            elif request not in self._waiting:
                return
        self.advance()

    def advance(self) -> None:
        """Submit what has its adapter by now."""
        ready = []
        with self._lock:
            self.cache.begin_iteration()
            are_held = self._are_held()
            for request in list(self._waiting):
                name = request.adapter.name
                if not request.finished and (are_held or not self.cache.acquire(name)):
                    continue
                del self._waiting[request]
                self.cache.unqueued(name)
                if not request.finished:
                    self._using.add(request)
                    self._overtakes += 1
                    ready.append(request)
        for request in ready:
            try:
                self._submit(request)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
                request.fail(error)

    def _are_held(self) -> bool:
        """Whether nothing is submitted, so that what runs makes room for the first one that waits."""
        first = next((request for request in self._waiting if not request.finished), None)
        if first is not self._first:
            self._first, self._overtakes = first, 0
        # It may take the place of an adapter that others wait for.
        return (
            first is not None and self._overtakes >= _MOST_OVERTAKES and not self.cache.start_load(first.adapter.name)
        )

    def fail(self, adapter: Adapter, reason: Exception) -> None:
        """Answer what waits for `adapter`."""
        with self._lock:
            waiting = [request for request in self._waiting if request.adapter is adapter]
        for request in waiting:
            request.fail(reason)

    def fail_late(self) -> None:
        """Answer what has waited beyond its deadline."""
        for request in list(self._waiting):
            request.fail_if_late()

    def close(self) -> None:
        """Answer what waits, and take nothing more."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for request in waiting:
            request.fail(unloading())
