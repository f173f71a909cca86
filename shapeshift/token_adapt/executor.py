"""The thread that decides and records: nobody who brings images waits for it, nor does the device that it plans for."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from shapeshift.errors import CancelledRequestError, EngineError, OverloadedError
from shapeshift.token_adapt.adapter import TokenAdapter
from shapeshift.token_adapt.device import Device, Ran
from shapeshift.token_adapt.interfaces import ImageModel, Pixels
from shapeshift.token_adapt.meters import ImageMeters
from shapeshift.token_adapt.request import EVICTED, ImageRequest, now_ms

_GONE = CancelledRequestError("the caller cancelled the request")
_LEAST_LEAD_MS, _MOST_LEAD_MS, _LEAD_PACE = 1.0, 20.0, 0.1
Log = Callable[[str], None]


class Executor:
    """Owns the adapter from `start` on, and the device's thread.

    The next batch is chosen shortly before the one that runs should end, for the moment when it should: later comers
    still count, and the device need not wait. While a batch takes longer than it should, nothing is chosen.
    """

    def __init__(self, model: ImageModel, adapter: TokenAdapter, meters: ImageMeters, log: Log) -> None:
        self.running = 0
        self._adapter = adapter
        self._meters = meters
        self._log = log
        self._inbox: queue.SimpleQueue[tuple[ImageRequest, Sequence[Pixels]] | Ran | None] = queue.SimpleQueue()
        self._device = Device(model, adapter.costs.gammas, self._inbox.put, meters.refused_tasks, log)
        self._closing = threading.Event()
        self._any_cancelled = threading.Event()
        # Of the batches that were handed to the device: how long each should take, and when all should be done, ms.
        self._ahead: deque[float] = deque()
        self._free_at = 0.0
        self._lead_ms = _LEAST_LEAD_MS
        self._thread = threading.Thread(target=self._serve, name="execution", daemon=True)

    def start(self) -> None:
        self._device.start()
        self._thread.start()

    def submit(self, request: ImageRequest, pixels: Sequence[Pixels]) -> None:
        """Let its images wait to be run; never blocks."""
        self._inbox.put((request, pixels))

    def cancel(self, request: ImageRequest) -> None:
        """Its caller has gone: what of it has not been handed to the device is not run."""
        request.cancelled = True
        self._any_cancelled.set()

    def close(self, timeout_s: float = 15.0) -> None:
        """Let the batches on the device end, answer what waits with UNAVAILABLE, end the threads."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  without this thread every caller would wait for ever
                self._log(f"images that wait are given up: {error}")
                self._give_up(EngineError(f"the execution thread failed: {error}"))
        self._device.close()
        self._take_all()
        self._give_up(OverloadedError("the model is being unloaded; retry elsewhere"))

    def _turn(self) -> None:
        self._take_in()
        self._drop_cancelled()
        if self._patience_s() == 0 and not self._closing.is_set():
            self._choose()

    def _patience_s(self) -> float | None:
        """How long there is nothing to choose, if nothing happens; None: for ever."""
        if not len(self._adapter):
            return None
        if not self._ahead:
            return 0.0
        now = now_ms()
        if len(self._ahead) > 1 or now >= self._free_at:
            return None
        return max(0.0, self._free_at - self._lead_ms - now) / 1e3

    def _choose(self) -> None:
        begun = now_ms()
        start = max(begun, self._free_at) if self._ahead else begun
        step = self._adapter.step(start)
        for query in step.evicted:
            self._meters.outcomes[EVICTED].add()
            query.item.request.evicted()
        if step.queries:
            takes_ms = float(self._adapter.costs.times([len(step.queries)])[0, step.gamma])
            self._ahead.append(takes_ms)
            self._free_at = start + takes_ms
            self.running += len(step.queries)
            self._device.submit(step)
        needed = 2 * (now_ms() - begun) + _LEAST_LEAD_MS
        self._lead_ms = min(self._lead_ms + _LEAD_PACE * (needed - self._lead_ms), _MOST_LEAD_MS)

    def _take_in(self) -> None:
        """Batch what has arrived and record what has run; without anything to choose wait for it."""
        patience_s = self._patience_s()
        try:
            item = self._inbox.get(patience_s != 0, patience_s or None)
        except queue.Empty:
            return
        self._take(item)
        self._take_all()

    def _take_all(self) -> None:
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, item: tuple[ImageRequest, Sequence[Pixels]] | Ran | None) -> None:
        if isinstance(item, Ran):
            self._record(item)
        elif item is not None:
            self._add(*item)

    def _add(self, request: ImageRequest, pixels: Sequence[Pixels]) -> None:
        if request.cancelled:
            request.fail(_GONE)
            return
        for query in request.queries(pixels, self._adapter.costs.gammas):
            self._adapter.add(query)

    def _drop_cancelled(self) -> None:
        if self._any_cancelled.is_set():
            self._any_cancelled.clear()
            for query in self._adapter.remove(lambda query: query.item.request.cancelled):
                query.item.request.fail(_GONE)

    def _record(self, ran: Ran) -> None:
        step, count = ran.step, len(ran.step.queries)
        gamma = self._adapter.costs.gammas[step.gamma]
        self._ahead.popleft()
        self._free_at = ran.done + sum(self._ahead)
        self.running -= count
        if ran.error is not None:
            self._log(f"a batch of {count} images at gamma {gamma} failed: {ran.error}")
            for query in step.queries:
                query.item.request.fail(EngineError(f"the engine failed: {ran.error}"))
                self.cancel(query.item.request)
            return
        self._adapter.costs.observe(step.gamma, count, ran.took_ms)
        for query, probabilities in zip(step.queries, ran.results, strict=True):
            query.item.request.computed(query.item.index, probabilities, gamma, count, ran.done)
        self._count(ran, gamma)

    def _count(self, ran: Ran, gamma: int) -> None:
        queries = ran.step.queries
        outcomes = [query.item.request.outcomes[query.item.index] for query in queries]
        gained = sum(query.brings[ran.step.gamma] for query in queries if ran.done < query.deadline)
        self._meters.ran(gamma, outcomes, float(gained), ran.step.plan_ms)

    def _give_up(self, error: Exception) -> None:
        for query in self._adapter.remove(lambda query: True):
            query.item.request.fail(error)
