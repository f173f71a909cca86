"""The first level: what it passes to its engines and makes of their outputs, and which engines a table takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.cascade import service as service_module
from shapeshift.cascade.candidates import CandidateTable, ServingCandidate
from shapeshift.cascade.service import CascadeService, ClassifyRequest
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines.execution.request import TextRequest
from shapeshift.errors import EngineError, InvalidInputError, OverloadedError
from shapeshift.serving.front import Client
from shapeshift.serving.parameters import RequestParameters
from tests.cascade.conftest import candidate, gap

if TYPE_CHECKING:
    from tests.cascade.conftest import Workspace

TWO = ("small", "large")
NONE: Any = None


class Executor:
    """Keeps the requests that it gets."""

    def __init__(self, *_: object) -> None:
        self.requests: list[TextRequest] = []

    def submit(self, request: TextRequest) -> None:
        self.requests.append(request)


@pytest.fixture
def service(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> CascadeService:
    """With an executor that computes nothing; every text is sure."""
    monkeypatch.setattr(service_module, "EngineExecutor", Executor)
    table = workspace.table(candidate("both", TWO, [gap(c=0.0)]))
    settings = CascadeSettings("candidates", "task")
    serving = ServingCandidate(table, table.candidates[0], pinned=False)
    return CascadeService(serving, workspace.paths.engines, settings, NONE, lambda text: None)


def queued(service: CascadeService) -> list[TextRequest]:
    executor: Any = service.executor
    requests: list[TextRequest] = executor.requests
    return requests


def submitted(
    service: CascadeService, rows: Sequence[Sequence[bytes]], **params: Any
) -> tuple[ClassifyRequest, list[ClassifyRequest]]:
    """A request, and each time that it ended."""
    ended: list[ClassifyRequest] = []
    request = ClassifyRequest(Client(NONE, False), rows, [], RequestParameters(**params), ended.append)
    service.acquire()
    service.submit(request)
    return request, ended


@pytest.mark.parametrize("latency_ms", [None, 60_000.0, 1e-6])
def test_the_engines_have_what_is_left_until_the_deadline(service: CascadeService, latency_ms: float | None) -> None:
    before = time.monotonic()
    submitted(service, [[b"one"]], latency_ms=latency_ms)
    spent_ms = (time.monotonic() - before) * 1e3
    left_ms = queued(service)[0].latency_ms
    if latency_ms is None:
        assert left_ms is None
    else:
        assert left_ms is not None and max(1e-3, latency_ms - spent_ms) <= left_ms <= max(1e-3, latency_ms)


def test_a_second_text_is_read_behind_the_first(service: CascadeService) -> None:
    request, _ = submitted(service, [[b"one two"], [b"one two", b"three"]])
    single, pair = (list(row.ids) for row in queued(service)[0].rows)
    assert [row.num_tokens for row in request.rows] == [len(single), len(pair)] and len(pair) > len(single)
    assert pair[: len(single)] == single


def test_a_row_that_cannot_be_read_is_named_and_nothing_is_queued(service: CascadeService) -> None:
    with pytest.raises(InvalidInputError, match="^row 1: "):
        submitted(service, [[b"one"], [b""]])
    assert queued(service) == []


def test_a_request_ends_with_its_results(service: CascadeService) -> None:
    request, ended = submitted(service, [[b"one two"], [b"three"]])
    (computed,) = queued(service)
    for row, logits in zip(computed.rows, ([9.0, 0.0], [0.0, 9.0]), strict=True):
        computed.complete(row, {"LOGITS": np.array(logits), "IMPORTANCE": np.ones(row.tokens)}, 7.5)
    assert ended == [request] and request.error is None
    assert [int(row.final.probabilities.argmax()) for row in request.rows] == [0, 1]
    assert [row.engine_ms for row in request.rows] == [7.5, 7.5]


def test_a_request_ends_with_the_error_of_its_engines(service: CascadeService) -> None:
    request, ended = submitted(service, [[b"one two"]])
    error = OverloadedError("full")
    queued(service)[0].fail(error)
    assert ended == [request] and request.error is error


def test_outputs_that_cannot_be_read_end_no_thread(service: CascadeService) -> None:
    request, ended = submitted(service, [[b"one two"]])
    (computed,) = queued(service)
    computed.complete(computed.rows[0], {"OTHER": np.zeros(2)})
    assert ended == [request] and isinstance(request.error, KeyError)


# Which engines a table takes.


def check(workspace: Workspace, table: CandidateTable, is_last: bool = False) -> Any:
    return table.check_engines(workspace.paths.engines / "small", "small", is_last)


def test_engines_of_another_checkpoint_are_refused(workspace: Workspace) -> None:
    table = workspace.table(candidate("both", TWO, [gap()]))
    engines = check(workspace, table)

    def stating(sha256: str) -> CandidateTable:
        models = [replace(one, checkpoint_sha256=sha256) if one.name == "small" else one for one in table.models]
        return replace(table, models=tuple(models))

    assert check(workspace, stating("")).checkpoint_sha256 == engines.checkpoint_sha256
    assert check(workspace, stating(engines.checkpoint_sha256)).labels == engines.labels
    with pytest.raises(EngineError, match="^candidate table of .*: small comes from another checkpoint; run `shape"):
        check(workspace, stating("0" * 64))


def test_labels_must_be_as_many_as_those_of_the_table(workspace: Workspace) -> None:
    table = workspace.table(candidate("both", TWO, [gap()]))
    check(workspace, table)
    with pytest.raises(EngineError, match="^small has 2 labels, the candidate table of task has 3; run `shapeshift"):
        check(workspace, replace(table, labels=(*table.labels, "more")))


def test_a_regression_needs_an_embedding_unless_no_level_follows(workspace: Workspace) -> None:
    """The engines of `small` have none."""
    table = workspace.table(candidate("one", ["small"], []), kind="regression")
    check(workspace, table, is_last=True)
    with pytest.raises(EngineError, match="^small has no output EMBEDDING; list it in its config.pbtxt and run"):
        check(workspace, table)
