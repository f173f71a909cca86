from __future__ import annotations

import threading

import numpy as np
import pytest

from shapeshift.engines.execution import request as request_module
from shapeshift.engines.execution.request import TextRequest
from shapeshift.errors import EngineError, OverloadedError


def made(rows: int, **options: object) -> tuple[TextRequest, list[TextRequest]]:
    """A request of `rows` rows, and the list of its `on_finished` calls."""
    finished: list[TextRequest] = []
    texts = [np.arange(1, 2 + row) for row in range(rows)]
    return TextRequest(texts, finished.append, **options), finished  # type: ignore[arg-type]


def test_rows_complete_in_any_order() -> None:
    request, finished = made(3)
    assert [row.tokens for row in request.rows] == [1, 2, 3]
    for index in (2, 0, 1):
        assert not finished and not request.finished
        request.complete(request.rows[index], {"A": np.array([index, 7]), "B": np.array(index, np.float32)})
    assert finished == [request] and request.finished and request.error is None
    assert request.outputs["A"].tolist() == [[0, 7], [1, 7], [2, 7]]
    assert request.outputs["B"].tolist() == [0, 1, 2] and request.outputs["B"].dtype == np.float32


def test_request_fails_only_once() -> None:
    request, finished = made(2)
    request.complete(request.rows[0], {"A": np.zeros(1)})
    first = EngineError("first")
    request.fail(first)
    request.fail(EngineError("second"))
    request.complete(request.rows[1], {"A": np.zeros(1)})
    assert finished == [request] and request.finished and request.error is first


def test_finished_request_cannot_fail() -> None:
    request, finished = made(1)
    request.complete(request.rows[0], {})
    request.fail(EngineError("late"))
    assert finished == [request] and request.error is None


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(request_module.time, "monotonic", lambda: now[0])
    patient, _ = made(1)
    assert patient.latency_ms is None
    request, finished = made(1, latency_ms=250)
    assert request.latency_ms is not None
    for moment in (100.0, 100.249):
        now[0] = moment
        request.fail_if_late()
        assert not finished
    now[0] = 100.251
    request.fail_if_late()
    patient.fail_if_late()
    assert finished == [request] and isinstance(request.error, OverloadedError)
    assert not patient.finished


@pytest.mark.parametrize("fails", [False, True])
def test_on_finished_is_called_once_by_concurrent_threads(fails: bool) -> None:
    for _ in range(50):
        request, finished = made(8)
        barrier = threading.Barrier(9)

        def report(index: int, request: TextRequest = request, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            request.complete(request.rows[index], {"A": np.array([index])})

        def fail(request: TextRequest = request, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            if fails:
                request.fail(EngineError("x"))

        threads = [threading.Thread(target=report, args=(index,)) for index in range(8)]
        threads.append(threading.Thread(target=fail))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert finished == [request]
        if request.error is None:
            assert request.outputs["A"].ravel().tolist() == list(range(8))
