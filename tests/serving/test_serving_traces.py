"""Spans of requests, as a receiver gets them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.serving import front, traces
from shapeshift.serving.events import TRACE_RATE_VARIABLE, TRACES_VARIABLE
from tests.fakes import Request
from tests.serving.otlp import PARENT, Receiver, traced_request
from tests.serving.otlp import receiver as receiver

TRACE, SPAN = PARENT.split("-")[1:3]


def test_a_request_is_a_span_with_its_parts(receiver: Receiver) -> None:
    tracer = traces.Tracer("encode")
    trace = tracer.begin(traced_request())
    assert trace is not None
    time.sleep(0.01)
    began = time.monotonic() - 0.005
    trace.span("level 2", began, began + 0.004, {"texts": 3})
    trace.end({"queue_ms": 4.0, "compute_ms": 2.0, "bins": [16], "tokens": 9, "id": "", "slo_class": None}, "OK")
    tracer.close()
    (span,) = receiver.named("encode")
    assert (span.trace, span.parent, span.failed) == (TRACE, SPAN, False)
    described = {"queue_ms": 4.0, "compute_ms": 2.0, "bins": [16], "tokens": 9, "outcome": "OK"}
    assert span.attributes == described, "what has no value is left out"
    assert abs(span.ended - time.time()) < 60 and span.ended - span.began > 0.009
    parts = receiver.within(span)
    assert {name: round(1e3 * (part.ended - part.began), 2) for name, part in parts.items()} == {
        "queue": 4.0,
        "compute": 2.0,
        "level 2": 4.0,
    }
    assert parts["compute"].began == pytest.approx(parts["queue"].ended, abs=1e-6)
    assert parts["queue"].began == pytest.approx(span.began, abs=1e-3)
    assert span.began < parts["level 2"].began < parts["level 2"].ended < span.ended


def test_generation_has_two_parts_in_place_of_one(receiver: Receiver) -> None:
    tracer = traces.Tracer("generate")
    trace = tracer.begin(traced_request())
    assert trace is not None
    trace.end({"queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0, "compute_ms": 5.0}, "OK")
    tracer.close()
    (span,) = receiver.named("generate")
    assert receiver.within(span).keys() == {"queue", "prefill", "decode"}


def test_a_failed_request_is_marked(receiver: Receiver) -> None:
    tracer = traces.Tracer("encode")
    trace = tracer.begin(traced_request())
    assert trace is not None
    trace.end({}, "UNAVAILABLE")
    tracer.close()
    (span,) = receiver.named("encode")
    assert span.failed and span.attributes == {"outcome": "UNAVAILABLE"} and receiver.within(span) == {}


def test_what_triton_does_not_trace_has_no_span(receiver: Receiver) -> None:
    tracer = traces.Tracer("encode")
    assert tracer.begin(Request()) is None
    tracer.close()
    assert receiver.spans == []


def test_a_question_of_the_sidecar_has_not_failed(receiver: Receiver) -> None:
    tracer = traces.Tracer("encode")
    trace = tracer.begin(traced_request())
    assert trace is not None
    trace.end({}, "CHECK_WRONG")
    tracer.close()
    (span,) = receiver.named("encode")
    assert not span.failed and span.attributes == {"outcome": "CHECK_WRONG"}


def test_calls_belong_to_the_span_of_their_request(receiver: Receiver) -> None:
    tracer = traces.Tracer("classify_text")
    outer = tracer.begin(traced_request())
    assert outer is not None
    inner = tracer.join(outer.header)
    assert inner is not None
    inner.end({}, "OK")
    outer.end({}, "OK")
    tracer.close()
    inside, outside = receiver.named("classify_text")
    assert (inside.trace, inside.parent) == (TRACE, outside.id)


@pytest.mark.parametrize(("rate", "share"), [("1", 1.0), ("1000000000", 0.0)])
def test_a_share_of_what_begins_here_is_traced(
    rate: str, share: float, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_RATE_VARIABLE, rate)
    tracer = traces.Tracer("gateway")
    begun = [trace for trace in (tracer.join("") for _ in range(20)) if trace is not None]
    assert len(begun) == 20 * share
    # What a client traces is traced at any rate, and what it has left out is not.
    assert tracer.join(PARENT) is not None
    assert tracer.join(PARENT.removesuffix("01") + "00") is None
    tracer.close()


def test_a_rate_that_is_none_is_refused_by_name(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE_RATE_VARIABLE, "0")
    with pytest.raises(InvalidInputError, match="SHAPESHIFT_TRACE_RATE: got '0'"):
        traces.Tracer("gateway")


@pytest.mark.parametrize(("rate", "least", "most"), [("1", 1000, 1000), ("100", 25, 31)])
def test_clients_cannot_have_more_traced_than_a_multiple_of_the_rate(
    rate: str, least: int, most: int, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_RATE_VARIABLE, rate)
    for begin in (lambda one: one.begin(traced_request()), lambda one: one.join(PARENT)):
        tracer = traces.Tracer("encode")
        assert least <= sum(begin(tracer) is not None for _ in range(1000)) <= most
        tracer.close()


def test_a_receiver_that_is_gone_or_hangs_costs_spans_alone(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.close()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for url in (receiver.url, f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"):
            monkeypatch.setenv(TRACES_VARIABLE, url)
            tracer = traces.Tracer("encode")
            for _ in range(10):
                trace = tracer.begin(traced_request())
                assert trace is not None
                trace.end({"queue_ms": 1.0}, "OK")
            ending = threading.Thread(target=tracer.close, daemon=True)
            ending.start()
            # Not for each batch that is left: Triton waits five seconds for a model to end.
            ending.join(60)
            assert not ending.is_alive()


def test_without_a_receiver_nothing_of_it_is_imported() -> None:
    script = (
        "import sys; from shapeshift.serving import front; import shapeshift.polymorph.front;"
        "assert front.tracer_of('encode') is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry') or name.endswith('.traces')])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_a_front_has_a_tracer_where_there_is_a_receiver(receiver: Receiver) -> None:
    tracer = front.tracer_of("encode")
    assert isinstance(tracer, traces.Tracer)
    tracer.close()
