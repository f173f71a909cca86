"""A receiver of traces: OTLP over HTTP, as protobuf and, as Triton sends it, as JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shapeshift.serving.events import TRACES_VARIABLE
from tests.fakes import Request

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""The header of a client that wants its request traced."""


class Span(NamedTuple):
    """One span. began, ended: seconds; attributes without their prefix `shapeshift.`."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began: float
    ended: float
    attributes: Mapping[str, Any]
    failed: bool


class Receiver:
    """Keeps what is sent to `url`, while it is open."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802  the library's name
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_json = self.headers["Content-Type"] == "application/json"
                outer.spans += from_json(body) if is_json else from_protobuf(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def named(self, name: str, **attributes: Any) -> list[Span]:
        """The spans of this project with this name and these attributes."""
        return [
            span
            for span in list(self.spans)
            if span.service == "shapeshift" and span.name == name and attributes.items() <= span.attributes.items()
        ]

    def above(self, span: Span) -> list[Span]:
        """What `span` lies in, the nearest first, as far as it has come here."""
        by_id = {one.id: one for one in list(self.spans)}
        found = []
        while (parent := by_id.get(span.parent)) is not None:
            found.append(span := parent)
        return found

    def within(self, span: Span) -> dict[str, Span]:
        """The parts of a span, by name."""
        return {one.name: one for one in list(self.spans) if one.parent == span.id}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver, to which tracers that are made from now on send."""
    found = Receiver()
    monkeypatch.setenv(TRACES_VARIABLE, found.url)
    yield found
    found.close()


def traced_request() -> Request:
    """A request that the server traces."""
    request = Request()
    request.trace_header = PARENT
    return request


def from_protobuf(body: bytes) -> list[Span]:
    message = ExportTraceServiceRequest()
    message.ParseFromString(body)
    return [
        Span(
            _values(resource.resource.attributes)["service.name"],
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano / 1e9,
            span.end_time_unix_nano / 1e9,
            _values(span.attributes),
            span.status.code == span.status.STATUS_CODE_ERROR,
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def from_json(body: bytes) -> list[Span]:
    """Of Triton: attributes are left out."""
    return [
        Span(
            "triton",
            span["name"],
            span["traceId"],
            span["spanId"],
            span.get("parentSpanId", ""),
            int(span["startTimeUnixNano"]) / 1e9,
            int(span["endTimeUnixNano"]) / 1e9,
            {},
            False,
        )
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key.removeprefix("shapeshift."): _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found
