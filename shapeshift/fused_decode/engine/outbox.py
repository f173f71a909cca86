"""What the decode loop hands over to be sent: ends and first tokens at once, further tokens in turn."""

from __future__ import annotations

from collections.abc import Callable

from shapeshift.fused_decode.request import Request

Deliver = Callable[[list[Request]], None]


class Outbox:
    """The requests with something to send. Only the generating thread uses it.

    deliver            takes requests, each at most once a call; must neither block nor raise
    responses_a_step   most requests that are delivered after one step for their further tokens; 0: any number. Those
                       that have waited longest go first, and what gathers meanwhile leaves with them

    A response takes a thread of the front, the server and the client from their cores to the next wait, and each core
    that the model lacks for a moment makes the others wait for it.
    """

    def __init__(self, deliver: Deliver, responses_a_step: int = 0) -> None:
        self._deliver = deliver
        self._responses_a_step = responses_a_step
        self._urgent: dict[Request, None] = {}
        self._waiting: dict[Request, None] = {}

    def add(self, request: Request) -> None:
        """`request` has new text to send, or has finished."""
        if request.is_finished or len(request.parts) == 1:
            self._waiting.pop(request, None)
            self._urgent[request] = None
        elif request not in self._urgent:
            self._waiting[request] = None

    def deliver_urgent(self) -> None:
        """Deliver the requests that have finished or have their first text."""
        if self._urgent:
            self._deliver(list(self._urgent))
            self._urgent.clear()

    def deliver_step(self) -> None:
        """Deliver after a step: what is urgent, and further tokens of as many requests as may be."""
        left = self._responses_a_step - len(self._urgent) if self._responses_a_step else len(self._waiting)
        for request in list(self._waiting)[: max(left, 0)]:
            del self._waiting[request]
            self._urgent[request] = None
        self.deliver_urgent()
