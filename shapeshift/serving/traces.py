"""Spans of OpenTelemetry for the requests that Triton traces, beside its own and under them.

Nothing imports this where no receiver is named. Spans are sent from a thread of their own; those that a receiver does
not take are lost.
"""

from __future__ import annotations

import json
import os
import threading
import time

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shapeshift.serving.events import TRACE_RATE_VARIABLE, TRACES_VARIABLE
from shapeshift.serving.front import RequestLine
from shapeshift.serving.metrics import CHECKS
from shapeshift.serving.pb_utils import InferenceRequest
from shapeshift.settings import require

HEADER = "traceparent"
_TIMEOUT_S = 2.0
# Most requests that are traced because their clients say so: so many times the rate, which traces of Triton's own take
# as well, and so many before that.
_CLIENTS_SHARE, _FIRST_TRACES = 2.0, 10.0
# Of a gateway whose environment has none.
_RATE = "1000"
_CONTEXTS = TraceContextTextMapPropagator()
# Times among the facts that follow each other, and what they are called. Where both of the last are there, they are
# the parts of the one before.
_QUEUE, _COMPUTE, _PARTS = "queue_ms", "compute_ms", ("prefill_ms", "decode_ms")


class Tracer:
    """Begins the spans of a process, and sends them to the receiver that the environment names.

    name: of the model, or of the program. Raises InvalidInputError naming the variable of the rate.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        rate = os.environ.get(TRACE_RATE_VARIABLE, _RATE)
        require(rate.isdecimal() and int(rate) >= 1, TRACE_RATE_VARIABLE, rate, "a whole number, at least 1")
        share = 1 / int(rate)
        self._credit, self._more_credit = _FIRST_TRACES, _CLIENTS_SHARE * share
        sampler = ParentBased(TraceIdRatioBased(share))
        resource = Resource({"service.name": "shapeshift", "process.pid": os.getpid()})
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(os.environ[TRACES_VARIABLE], timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("shapeshift")

    def begin(self, request: InferenceRequest) -> RequestTrace | None:
        """The span of a request that has arrived just now.

        None where Triton does not trace it, or traces more than a multiple of the rate, as clients want it to.
        """
        self._credit = min(self._credit + self._more_credit, _FIRST_TRACES)
        triton = request.trace()
        headers = None if triton is None else triton.get_context()
        header = json.loads(headers).get(HEADER) if headers else None
        return self._within(header) if header else None

    def join(self, header: str) -> RequestTrace | None:
        """See `serving.front.Tracer`. What clients trace is bounded as in `begin`."""
        self._credit = min(self._credit + self._more_credit, _FIRST_TRACES)
        return self._within(header)

    def _within(self, header: str) -> RequestTrace | None:
        context = _CONTEXTS.extract({HEADER: header})
        if trace.get_current_span(context).get_span_context().trace_flags.sampled:
            if self._credit < 1:
                return None
            self._credit -= 1
        span = self._tracer.start_span(self._name, context, SpanKind.SERVER)
        return RequestTrace(self._tracer, span) if span.is_recording() else None

    def close(self) -> None:
        """Send what is left, as far as the receiver takes it at once."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_TIMEOUT_S)


class RequestTrace:
    """The span of one request; see `serving.front.Trace`."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._began = time.monotonic()
        # Spans have the time of day.
        self._to_wall_ns = time.time_ns() - time.monotonic_ns()
        headers: dict[str, str] = {}
        _CONTEXTS.inject(headers, trace.set_span_in_context(span))
        self.header = headers[HEADER]

    def span(self, name: str, began: float, ended: float, facts: RequestLine) -> None:
        """See `serving.front.Trace`."""
        parent = trace.set_span_in_context(self._span)
        part = self._tracer.start_span(name, parent, start_time=self._at(began))
        self._describe(part, facts)
        part.end(self._at(ended))

    def end(self, facts: RequestLine, outcome: str) -> None:
        """The request has ended."""
        at = self._began
        has_parts = all(name in facts for name in _PARTS)
        for name in (_QUEUE, *(_PARTS if has_parts else (_COMPUTE,))):
            if name in facts:
                self.span(name.removesuffix("_ms"), at, at := at + facts[name] / 1e3, {})
        self._describe(self._span, {**facts, "outcome": outcome})
        if outcome not in ("OK", *CHECKS.values()):
            self._span.set_status(StatusCode.ERROR, outcome)
        self._span.end()

    def _describe(self, span: Span, facts: RequestLine) -> None:
        span.set_attributes(
            {f"shapeshift.{name}": value for name, value in facts.items() if value not in (None, "", [])}
        )

    def _at(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._to_wall_ns
