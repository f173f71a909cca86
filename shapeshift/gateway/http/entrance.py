"""What every request passes: its id, the bound on requests in flight, its key and its limits; and what becomes of its
faults.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shapeshift.errors import ShapeshiftError
from shapeshift.gateway.errors import MESSAGES, ApiError, api_error, overloaded
from shapeshift.gateway.http.api_keys import ApiKeys
from shapeshift.gateway.http.meter import GatewayMetrics, Meter, RateLimits
from shapeshift.gateway.upstream import TRACE
from shapeshift.serving.front import Tracer

_LOG = logging.getLogger("shapeshift.gateway")
_REQUESTS = logging.getLogger("shapeshift.gateway.requests")
REQUEST_ID, METER = "request_id", "meter"
"""In the state of a request."""
_ID_HEADER, _TRACE_HEADER = b"x-request-id", b"traceparent"
# By which Anthropic's clients know it.
_ANTHROPICS_ID = b"request-id"
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HEALTH = "/health"
# Never refused: what tells whether the gateway is overloaded.
_UNBOUNDED = (_HEALTH, "/metrics")


class Entrance:
    """Names and counts requests, and refuses those beyond `max_requests` in flight, without a key of `keys`, or beyond
    the limits of their key.

    Each that has ended has a line in the log `shapeshift.gateway.requests`; status 0: its client left before an answer.
    An exception of the application becomes an answer; one that is none of the project's is logged. keys: None where no
    key is asked for.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: GatewayMetrics,
        max_requests: int,
        keys: ApiKeys | None,
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._metrics = metrics
        self._limits = RateLimits()
        self._max_requests = max_requests
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        request_id = _header(scope, _ID_HEADER)
        if not _VALID_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        meter = Meter(self._metrics, self._limits)
        scope.setdefault("state", {}).update({REQUEST_ID: request_id, METER: meter})
        status, began = 0, time.monotonic()
        trace = None if self._tracer is None else self._tracer.join(_header(scope, _TRACE_HEADER))
        if trace is not None:
            TRACE.set(trace.header)

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.answers.labels(status).inc()
                more = [(_ID_HEADER, request_id.encode()), *meter.headers(path)]
                if path.startswith(MESSAGES):
                    more.append((_ANTHROPICS_ID, request_id.encode()))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            if (refusal := self._refusal(scope, meter)) is not None:
                await refusal.response(path, request_id)(scope, receive, counted)
                return
            self._metrics.in_flight += 1
            try:
                await self._app(scope, receive, counted)
            except Exception as error:
                if status:
                    raise
                if not isinstance(error, ShapeshiftError | ApiError):
                    _LOG.exception("%s %s failed, request id %s", scope["method"], path, request_id)
                await api_error(error).response(path, request_id)(scope, receive, counted)
            finally:
                self._metrics.in_flight -= 1
                meter.end()
        finally:
            if _REQUESTS.isEnabledFor(logging.INFO):
                fields = {"id": request_id, "method": scope["method"], "path": path, "status": status}
                fields["ms"] = round((time.monotonic() - began) * 1e3, 1)
                _REQUESTS.info("%(method)s %(path)s %(status)d %(ms).1f ms, %(id)s", fields, extra={"fields": fields})
            if trace is not None:
                facts = {"id": request_id, "method": scope["method"], "path": path, "status": status}
                trace.end(facts, "OK" if 200 <= status < 400 else str(status))

    def _refusal(self, scope: Scope, meter: Meter) -> ApiError | None:
        in_flight = self._metrics.in_flight
        if in_flight >= self._max_requests and scope["path"] not in _UNBOUNDED:
            return overloaded(f"max_requests: {in_flight} requests are in flight; retry later")
        # What a load balancer asks needs no key.
        if self._keys is None or scope["path"] == _HEALTH:
            return None
        # Anthropic's clients send the second one.
        keys = (f"Bearer {key}" for key in _headers(scope, b"x-api-key"))
        key = self._keys.of([*_headers(scope, b"authorization")] or [*keys])
        if isinstance(key, ApiError):
            return key
        # Looking at what is served uses nothing.
        return meter.admit(key) if scope["method"] == "POST" else None


def _headers(scope: Scope, name: bytes) -> Iterator[str]:
    return (value.decode("latin-1") for key, value in scope["headers"] if key == name)


def _header(scope: Scope, name: bytes) -> str:
    """The first header of this name; empty where there is none."""
    return next(_headers(scope, name), "")
