"""What every request passes: its id, the bound on requests in flight, and the counts of answers."""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shapeshift.gateway.errors import ApiError, api_error

_LOG = logging.getLogger("shapeshift.gateway")
REQUEST_ID = "request_id"
_HEADER = b"x-request-id"
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Never refused: what tells whether the gateway is overloaded.
_UNBOUNDED = ("/health", "/metrics")


class RequestIds:
    """Gives each request the id of its header X-Request-Id, or a new one, and its answer the same header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == _HEADER), "")
        own = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[REQUEST_ID] = own

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (_HEADER, own.encode())]}
            await send(message)

        await self._app(scope, receive, named)


class Faults:
    """Answers a request that ends with an unexpected exception with status 500, and logs the exception."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            _LOG.exception("%s %s failed, request id %s", scope["method"], scope["path"], scope["state"][REQUEST_ID])
            await api_error(error).response()(scope, receive, send)


class Traffic:
    """Requests in flight, and answers by status."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.answers: Counter[int] = Counter()

    def exposition(self, num_broken: int = 0) -> str:
        """In the Prometheus text format. num_broken: lines of the file of keys that are none."""
        lines = [
            "# HELP shapeshift_gateway_requests_running Requests in flight",
            "# TYPE shapeshift_gateway_requests_running gauge",
            f"shapeshift_gateway_requests_running {self.in_flight}",
            "# HELP shapeshift_gateway_broken_key_lines Lines of the file of keys that are left out",
            "# TYPE shapeshift_gateway_broken_key_lines gauge",
            f"shapeshift_gateway_broken_key_lines {num_broken}",
            "# HELP shapeshift_gateway_answers_total Answers by HTTP status",
            "# TYPE shapeshift_gateway_answers_total counter",
            *(
                f'shapeshift_gateway_answers_total{{status="{key}"}} {self.answers[key]}'
                for key in sorted(self.answers)
            ),
        ]
        return "".join(f"{line}\n" for line in lines)


class Admission:
    """Counts requests, and answers those beyond `max_requests` in flight with status 429."""

    def __init__(self, app: ASGIApp, traffic: Traffic, max_requests: int) -> None:
        self._app = app
        self._traffic = traffic
        self._max_requests = max_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._traffic.answers[message["status"]] += 1
            await send(message)

        if self._traffic.in_flight >= self._max_requests and scope["path"] not in _UNBOUNDED:
            text = f"max_requests: {self._traffic.in_flight} requests are in flight; retry later"
            error = ApiError(429, text, "rate_limit_error", code="overloaded", headers={"retry-after": "1"})
            await error.response()(scope, receive, counted)
            return
        self._traffic.in_flight += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            self._traffic.in_flight -= 1
