"""The one thread of a process that hands responses to Triton.

`ResponseSender.send` blocks for milliseconds when other threads are busy, so no thread that computes may
call it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from shapeshift.serving import replies

Make = Callable[[], Any]


class SenderThread:
    """Sends exactly one final response for each `submit`, in order of submission."""

    def __init__(self, pb_utils: Any, log: Callable[[str], None]) -> None:
        self._pb_utils = pb_utils
        self._final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._log = log
        self._queue: queue.SimpleQueue[tuple[Any, Make, Callable[[], None] | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def submit(self, response_sender: Any, make: Make, after: Callable[[], None] | None = None) -> None:
        """Queue the response that `make` returns (called on the sender thread); never blocks.

        Where `make` raises, the caller is answered with that error. `after` is called once the response was
        handed over or could not be.
        """
        self._queue.put((response_sender, make, after))

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, then end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            response_sender, make, after = item
            # The sender must be released before the next wait: Triton keeps a model alive while one lives.
            del item
            try:
                response_sender.send(self._made(make), flags=self._final)
            except Exception as error:  # noqa: BLE001  whatever Triton raises, the thread must go on
                self._log(f"a response could not be sent: {error}")
            del response_sender, make
            if after is not None:
                after()
            del after

    def _made(self, make: Make) -> Any:
        try:
            return make()
        except Exception as error:  # noqa: BLE001  without a response the caller would wait for ever
            self._log(f"a response could not be made: {error}")
            return replies.error_response(self._pb_utils, error)
