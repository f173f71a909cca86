from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2

from client.open_loop import PlannedRequest, ReplayError, replay, serialise
from client.report import Report
from shapeshift.errors import InvalidInputError

TEXT = {"TEXT": np.array([[b"some text"]], dtype=object)}


def every(gap_s: float, count: int, **parameters: Any) -> list[PlannedRequest]:
    return [PlannedRequest(gap_s * k, TEXT, parameters) for k in range(count)]


def run(server: Any, requests: list[PlannedRequest], **settings: Any) -> Report:
    return asyncio.run(replay(server.url, "encode", requests, **{"warmup": 0, **settings}))


def test_every_request_is_sent_and_answered(server: Any) -> None:
    report = run(server, every(0.005, 40), warmup=3)
    assert set(report.kind.tolist()) == {"OK"}
    assert len(server.received) == 43
    assert np.all(report.sent_s >= report.intended_s)
    assert np.all(report.done_s > report.sent_s)
    assert report.cpu_s > 0
    summary = report.summary()
    assert (summary.planned, summary.sent, summary.ok, summary.failed) == (40, 40, 40, {})


def test_sending_never_waits_for_answers(server: Any) -> None:
    report = run(server, every(0.005, 40, delay_s=1.5))
    assert report.ok.all()
    assert report.sent_s.max() < report.done_s.min()


def test_a_queue_in_the_server_shows_in_the_latencies(server: Any) -> None:
    # 20 ms of service every 5 ms, one at a time: a client that waits for answers would see 20 ms each.
    report = run(server, every(0.005, 40, service_s=0.02))
    assert report.ok.all()
    latency = np.sort(report.latency_s)
    assert latency[-1] > 10 * 0.02
    assert np.median(latency) > 5 * 0.02


def test_a_client_that_falls_behind_reports_it_and_hides_nothing(server: Any) -> None:
    async def stalled() -> Report:
        async def stall() -> None:
            while not server.received:
                await asyncio.sleep(0.001)
            time.sleep(0.4)

        stalling = asyncio.create_task(stall())
        report = await replay(server.url, "encode", every(0.01, 60), warmup=0)
        await stalling
        return report

    report = asyncio.run(stalled())
    assert report.ok.all()
    assert report.lateness_s.max() > 0.2
    # The time in which a request could not be sent is part of its latency.
    assert np.all(report.latency_s >= report.lateness_s)
    assert np.allclose(report.latency_s, report.done_s - report.intended_s)
    summary = report.summary()
    assert summary.late >= 5
    assert summary.max_ms is not None
    assert summary.max_ms >= summary.late_max_ms > 200


def test_failures_are_counted_by_their_code(server: Any) -> None:
    plans = [{}, {"fail": "UNAVAILABLE"}, {"fail": "INVALID_ARGUMENT"}, {"fail": "UNAVAILABLE"}] * 5
    requests = [PlannedRequest(0.002 * k, TEXT, parameters) for k, parameters in enumerate(plans)]
    report = run(server, requests)
    assert report.kind.tolist() == [plan.get("fail", "OK") for plan in plans]
    summary = report.summary(slo_s=60.0)
    assert summary.failed == {"UNAVAILABLE": 10, "INVALID_ARGUMENT": 5}
    assert (summary.sent, summary.ok, summary.within_slo) == (20, 5, 0.25)
    assert report.messages["UNAVAILABLE"] == "fake failure UNAVAILABLE"


def test_a_straggler_ends_with_its_time_out(server: Any) -> None:
    requests = [PlannedRequest(0.0, TEXT, {"delay_s": 60.0}), *every(0.01, 5)]
    requests.sort(key=lambda request: request.at_s)
    report = run(server, requests, timeout_s=2.0)
    assert Counter(report.kind.tolist()) == {"OK": 5, "DEADLINE_EXCEEDED": 1}
    assert report.latency_s[report.ok].max() < report.latency_s[~report.ok].min()


def test_the_replay_ends_when_the_drain_time_is_over(server: Any) -> None:
    start = time.monotonic()
    report = run(server, every(0.01, 5, delay_s=60.0), timeout_s=60.0, drain_s=0.3)
    assert time.monotonic() - start < 60
    assert set(report.kind.tolist()) == {"UNANSWERED"}
    assert np.isnan(report.done_s).all()
    assert "UNANSWERED" in report.messages
    assert report.summary().failed == {"UNANSWERED": 5}


def test_the_limit_in_flight_fails_requests_and_delays_none(server: Any) -> None:
    report = run(server, every(0.005, 40, delay_s=1.5), max_in_flight=4)
    assert report.kind.tolist() == ["OK"] * 4 + ["IN_FLIGHT_LIMIT"] * 36
    assert len(server.received) == 4
    assert np.isnan(report.sent_s[4:]).all()
    # They failed when they were due, long before any of the four answers.
    assert report.done_s[4:].max() < report.done_s[:4].min()
    assert report.summary().sent == 4


def test_answers_are_kept_on_demand(server: Any) -> None:
    texts = [{"TEXT": np.array([[b"x" * size]], dtype=object)} for size in (1, 5, 9)]
    report = run(server, [PlannedRequest(0.0, text) for text in texts], keep_answers=True, outputs=["EMBEDDING"])
    values = []
    for answer in report.answers:
        assert answer is not None
        result = InferResult(service_pb2.ModelInferResponse.FromString(answer))
        values.append(result.as_numpy("EMBEDDING")[0, 0])
    assert values == [5, 9, 13]
    assert all(request.outputs[0].name == "EMBEDDING" for request in server.received)
    assert run(server, every(0.0, 2)).answers == ()


def test_the_messages_are_those_of_the_inference_protocol() -> None:
    inputs = {
        "INPUT_IDS": np.array([[101, 7, 102], [101, 102, 0]], dtype=np.int64),
        "IMAGE": np.array([b"\0jpeg\0", "é"], dtype=object),
        "NONE": np.array([], dtype=object),
    }
    parameters: dict[str, str | bool | int | float] = {"truncate": True, "level": 3, "latency_ms": 2.5, "task": "a"}
    (payload,) = serialise("m", [PlannedRequest(0.0, inputs, parameters)], ["OUT"])
    message = service_pb2.ModelInferRequest.FromString(payload)
    assert message.model_name == "m"
    assert [(one.name, one.datatype, list(one.shape)) for one in message.inputs] == [
        ("INPUT_IDS", "INT64", [2, 3]),
        ("IMAGE", "BYTES", [2]),
        ("NONE", "BYTES", [0]),
    ]
    contents = list(message.raw_input_contents)
    assert contents[0] == inputs["INPUT_IDS"].tobytes()
    assert contents[1] == b"\x06\0\0\0\0jpeg\0" + b"\x02\0\0\0\xc3\xa9"
    assert contents[2] == b""
    assert message.parameters["truncate"].bool_param is True
    assert message.parameters["level"].int64_param == 3
    assert message.parameters["latency_ms"].double_param == 2.5
    assert message.parameters["task"].string_param == "a"


def test_requests_with_the_same_content_objects_share_one_message() -> None:
    payloads = serialise("m", [PlannedRequest(float(k), TEXT) for k in range(3)])
    assert payloads[0] is payloads[1] is payloads[2]
    different = serialise("m", [PlannedRequest(0.0, TEXT), PlannedRequest(0.0, TEXT, {"truncate": True})])
    assert different[0] != different[1]


@pytest.mark.parametrize(
    ("field", "requests", "settings"),
    [
        ("requests", [], {}),
        ("at_s", [PlannedRequest(1.0, TEXT), PlannedRequest(0.5, TEXT)], {}),
        ("at_s", [PlannedRequest(-1.0, TEXT)], {}),
        ("max_in_flight", [PlannedRequest(0.0, TEXT)], {"max_in_flight": 0}),
        ("timeout_s", [PlannedRequest(0.0, TEXT)], {"timeout_s": 0}),
        ("drain_s", [PlannedRequest(0.0, TEXT)], {"drain_s": 0}),
        ("TEXT", [PlannedRequest(0.0, {"TEXT": np.array(["text"])})], {}),
    ],
)
def test_invalid_arguments_are_refused_by_field(
    field: str, requests: list[PlannedRequest], settings: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        run(SimpleNamespace(url="127.0.0.1:1"), requests, **settings)
    assert refused.value.field == field


def test_a_missing_server_is_an_error(server: Any) -> None:
    server.stop()
    with pytest.raises(ReplayError, match="no inference server answers at"):
        run(server, every(0.0, 1), connect_timeout_s=0.5)


def test_a_warm_up_without_any_success_is_an_error(server: Any) -> None:
    with pytest.raises(ReplayError, match="NOT_FOUND: fake failure NOT_FOUND"):
        run(server, every(0.0, 1, fail="NOT_FOUND"), warmup=2)
    mixed = [PlannedRequest(0.0, TEXT, {"fail": "UNAVAILABLE"}), PlannedRequest(0.0, TEXT)]
    assert run(server, mixed, warmup=2).kind.tolist() == ["UNAVAILABLE", "OK"]
