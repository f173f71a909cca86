"""The threads that decode images, in order of arrival; what would be too late is refused or not decoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shapeshift.serving.bounds import require_deadline, unloading
from shapeshift.serving.liveness import StepCounter
from shapeshift.token_adapt.executor import Executor
from shapeshift.token_adapt.interfaces import Pixels
from shapeshift.token_adapt.request import ImageRequest

Decode = Callable[[int], Pixels]
_SMOOTHING = 0.1


class DecoderPool:
    """Hands decoded requests to the executor.

    image_ms: mean time of recent images; 0 before the first. steps: images that have been decoded.
    """

    def __init__(self, threads: int, executor: Executor) -> None:
        self.image_ms = 0.0
        self._num_threads = threads
        self._executor = executor
        self._num_waiting = 0
        self.steps = StepCounter("decode", lambda: self._num_waiting > 0)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "decode")

    def submit(self, request: ImageRequest, decode: Decode) -> None:
        """Decode the images of a request; decode(row) returns one. Never blocks.

        Raises OverloadedError where images wait and the request would miss its deadline, and after `close`.
        """
        with self._lock:
            if self._num_waiting:
                require_deadline(self._predicted_ms(request), request.options.latency_ms)
            self._num_waiting += request.num_images
        try:
            self._threads.submit(self._run, request, decode)
        except RuntimeError:
            raise unloading() from None

    def close(self) -> None:
        """Decode what waits, then end the threads."""
        self._threads.shutdown()

    def _predicted_ms(self, request: ImageRequest) -> float:
        waiting_ms = self._num_waiting * self.image_ms / self._num_threads
        return waiting_ms + request.num_images * self.image_ms + self._executor.usual_ms

    def _run(self, request: ImageRequest, decode: Decode) -> None:
        pixels = []
        try:
            for row in range(request.num_images):
                if request.cancelled or not self._executor.can_meet(request.deadline):
                    self._executor.give_up(request)
                    return
                began = time.monotonic()
                pixels.append(decode(row))
                took_ms = (time.monotonic() - began) * 1e3
                with self._lock:
                    self.steps.step()
                self.image_ms += (_SMOOTHING if self.image_ms else 1.0) * (took_ms - self.image_ms)
        except Exception as error:  # noqa: BLE001  an invalid image fails its own request only
            request.fail(error)
        else:
            self._executor.submit(request, pixels)
        finally:
            with self._lock:
                self._num_waiting -= request.num_images
                self.steps.step()
