"""What a front says to a request, once: its outputs or an error in their place, sent and counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shapeshift.serving import replies
from shapeshift.serving.metrics import RequestMeters
from shapeshift.serving.sender import Make, SenderThread

Submit = Callable[[Any, Any], None]


class Answers:
    """Answers go through `sender`; `meters` counts them once they were handed over."""

    def __init__(self, pb_utils: Any, sender: SenderThread, meters: RequestMeters) -> None:
        self._pb_utils = pb_utils
        self._sender = sender
        self._meters = meters

    def start(self, requests: Sequence[Any], submit: Submit) -> None:
        """Call `submit(request, its response sender)` for each; what it raises is that request's answer."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                submit(request, sender)
            except Exception as error:  # noqa: BLE001  one bad request must not cost the others
                self.fail(sender, error)

    def send(
        self,
        sender: Any,
        make: Make,
        arrived: float,
        then: Callable[[], None] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Answer with what `make` returns on the sender's thread; see `SenderThread.submit`.

        arrived: monotonic, in seconds. then: called after that has been counted. before: called on the sender's
        thread before the answer is made.
        """
        self._sender.submit(sender, _preceded(make, before), partial(self._served, arrived, then))

    def fail(self, sender: Any, error: Exception, before: Callable[[], None] | None = None) -> None:
        """Answer with `error`; before: as for `send`."""
        make = partial(replies.error_response, self._pb_utils, error)
        counts = self._meters.answered[replies.code_name(error)].add
        self._sender.submit(sender, _preceded(make, before), counts)

    def _served(self, arrived: float, then: Callable[[], None] | None) -> None:
        self._meters.latency_ms.observe((time.monotonic() - arrived) * 1e3)
        self._meters.answered["OK"].add()
        if then is not None:
            then()


def _preceded(make: Make, before: Callable[[], None] | None) -> Make:
    if before is None:
        return make

    def both() -> Any:
        before()
        return make()

    return both
