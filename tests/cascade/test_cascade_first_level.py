"""The first level: what it passes to its engines, what it gives back, and which engines it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.cascade import first_level
from shapeshift.cascade.candidates.table import CandidateTable
from shapeshift.cascade.first_level import FirstLevel, check_engines
from shapeshift.cascade.request import LevelResult
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines.execution.request import TextRequest
from shapeshift.errors import EngineError, InvalidInputError, OverloadedError
from tests.cascade.conftest import candidate, gap

if TYPE_CHECKING:
    from tests.cascade.conftest import Workspace

TWO = ("small", "large")
Given = LevelResult | Exception


class Executor:
    """Keeps the requests that it is given."""

    def __init__(self) -> None:
        self.requests: list[TextRequest] = []

    def submit(self, request: TextRequest) -> None:
        self.requests.append(request)

    def close(self) -> None:
        pass


@pytest.fixture
def level(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> FirstLevel:
    """With an executor that computes nothing, at the monotonic second 1000."""
    monkeypatch.setattr(first_level, "EngineExecutor", lambda *given: Executor())
    monkeypatch.setattr(first_level, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    table = workspace.table(candidate("both", TWO, [gap()]))
    own = CascadeSettings("candidates", "task")
    return FirstLevel(workspace.paths.engines, table, table.candidates[0], own, lambda text: None, None)


def submitted(level: FirstLevel, rows: Sequence[Sequence[bytes]], deadline: float | None = None) -> Any:
    """The request that the engines get, and the number of tokens of each row."""
    counts = level.submit(rows, False, deadline, lambda result: None)
    executor: Any = level.executor
    return executor.requests[-1], counts


@pytest.mark.parametrize(
    ("deadline", "latency_ms"), [(None, None), (1002.5, 2500.0), (1000.0, 1e-3), (990.0, 1e-3), (1000.0001, 0.1)]
)
def test_what_is_left_until_the_deadline_is_in_milliseconds_and_above_none(
    level: FirstLevel, deadline: float | None, latency_ms: float | None
) -> None:
    request, _ = submitted(level, [[b"one"]], deadline)
    assert request.latency_ms == (None if latency_ms is None else pytest.approx(latency_ms, rel=1e-3))


def test_a_second_text_is_read_behind_the_first(level: FirstLevel) -> None:
    request, counts = submitted(level, [[b"one two"], [b"one two", b"three"]])
    single, pair = (list(row.ids) for row in request.rows)
    assert counts == [len(single), len(pair)] and len(pair) > len(single)
    assert pair[: len(single)] == single


def test_a_row_that_cannot_be_read_is_named_and_nothing_is_queued(level: FirstLevel) -> None:
    with pytest.raises(InvalidInputError, match="^row 1: "):
        submitted(level, [[b"one"], [b""]])
    executor: Any = level.executor
    assert executor.requests == []


def test_a_request_ends_with_its_results_or_its_error(level: FirstLevel) -> None:
    found: list[Given] = []
    level.submit([[b"one two"], [b"three"]], False, None, found.append)
    executor: Any = level.executor
    (request,) = executor.requests
    widest = max(len(row.ids) for row in request.rows)
    request.outputs = {
        "LOGITS": np.array([[1.0, 2.0], [3.0, 4.0]]),
        "IMPORTANCE": np.arange(2.0 * (widest + 5)).reshape(2, -1),
    }
    request.engine_ms = 7.5
    request._on_finished(request)
    (result,) = found
    assert isinstance(result, LevelResult)
    assert [list(one.logits) for one in result.outputs] == [[1.0, 2.0], [3.0, 4.0]]
    lengths = [len(row.ids) for row in request.rows]
    assert [None if one.importance is None else len(one.importance) for one in result.outputs] == lengths
    assert [one.embedding for one in result.outputs] == [None, None]
    # An answer that cannot be read must not end the thread of the engines.
    request.outputs = {}
    request._on_finished(request)
    assert isinstance(found[1], KeyError)
    request.error = OverloadedError("full")
    request._on_finished(request)
    assert found[2] is request.error


# Which engines it takes.


def check(workspace: Workspace, table: CandidateTable, level: int = 0) -> Any:
    folder: Path = workspace.paths.engines / table.candidates[0].levels[level]
    return check_engines(folder, table, table.candidates[0], level)


def test_engines_of_another_checkpoint_are_refused(workspace: Workspace) -> None:
    table = workspace.table(candidate("both", TWO, [gap()]))
    made = check(workspace, table)

    def stated(sha256: str) -> CandidateTable:
        models = [replace(one, checkpoint_sha256=sha256) if one.name == "small" else one for one in table.models]
        return replace(table, models=type(table.models)(models))

    assert check(workspace, stated("")).checkpoint_sha256 == made.checkpoint_sha256
    assert check(workspace, stated(made.checkpoint_sha256)).labels == made.labels
    with pytest.raises(EngineError, match="^candidate table of .*: small comes from another checkpoint; run `shape"):
        check(workspace, stated("0" * 64))


def test_labels_must_be_as_many_as_those_of_the_table(workspace: Workspace) -> None:
    table = workspace.table(candidate("both", TWO, [gap()]))
    check(workspace, table)
    with pytest.raises(EngineError, match="^small has 2 labels, the candidate table of task has 3; run `shapeshift"):
        check(workspace, replace(table, labels=(*table.labels, "more")))


@pytest.mark.parametrize(("levels", "missing"), [(("small", "number"), True), (("small",), False)])
def test_a_regression_needs_an_embedding_unless_no_level_follows(
    workspace: Workspace, levels: tuple[str, ...], missing: bool
) -> None:
    """The engines of `small` have none."""
    table = workspace.table(candidate("one", levels, [gap() for _ in levels[1:]]))
    table = replace(table, kind="regression", labels=("LABEL_0", "LABEL_1"))
    if not missing:
        check(workspace, table)
        return
    with pytest.raises(EngineError, match="^small has no output EMBEDDING; list it in its config.pbtxt and run"):
        check(workspace, table)
