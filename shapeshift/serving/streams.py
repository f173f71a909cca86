"""The one thread that hands a stream's responses to Triton, merging what waits for the same stream.

`ResponseSender.send` blocks for milliseconds when other threads are busy. Whoever computes therefore only
says which streams have something to tell; what that is, the stream is asked when its turn comes, so that
everything that has gathered meanwhile goes out in one response.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shapeshift.serving import replies


class Outgoing(Protocol):
    """One request's answer as the sending thread sees it; that thread alone calls these methods."""

    response_sender: Any
    """Triton's; None once the last response was handed over."""

    def next_response(self) -> tuple[Any, bool] | None:
        """The response for what waits now, and whether it is the last; None where nothing waits."""
        ...

    def handed_over(self, last: bool) -> None:
        """The response was handed over, or could not be."""
        ...

    def broken(self) -> None:
        """A response could not be handed over: nobody is there to read further ones."""
        ...


class OneResponse:
    """An answer of one response that `make` returns; `after` is called once it was handed over or could not be."""

    def __init__(self, response_sender: Any, make: Callable[[], Any], after: Callable[[], None] | None = None) -> None:
        self.response_sender = response_sender
        self._make = make
        self._after = after

    def next_response(self) -> tuple[Any, bool]:
        return self._make(), True

    def handed_over(self, last: bool) -> None:
        if self._after is not None:
            self._after()

    def broken(self) -> None:
        """Nothing further would come."""


class StreamThread:
    """Sends the responses of many streams, and after each stream's last one nothing more."""

    def __init__(self, pb_utils: Any, log: Callable[[str], None]) -> None:
        self._pb_utils = pb_utils
        self._final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._log = log
        self._queue: queue.SimpleQueue[Sequence[Outgoing] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def post(self, streams: Sequence[Outgoing]) -> None:
        """Say that these have something to tell; never blocks. The sequence must not change afterwards."""
        self._queue.put(streams)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what was posted, then end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (streams := self._queue.get()) is not None:
            for stream in streams:
                if stream.response_sender is not None:
                    self._serve(stream)
            # Nothing may be held while waiting: Triton keeps a model alive while one of its senders lives.
            streams = stream = None  # type: ignore[assignment]

    def _serve(self, stream: Outgoing) -> None:
        try:
            found = stream.next_response()
        except Exception as error:  # noqa: BLE001  without a last response the caller would wait for ever
            self._log(f"a response could not be made: {error}")
            found = replies.error_response(self._pb_utils, error), True
        if found is None:
            return
        response, last = found
        try:
            stream.response_sender.send(response, flags=self._final if last else 0)
        except Exception as error:  # noqa: BLE001  whatever Triton raises, the thread must go on
            self._log(f"a response could not be sent: {error}")
            stream.broken()
        if last:
            stream.response_sender = None
        stream.handed_over(last)
