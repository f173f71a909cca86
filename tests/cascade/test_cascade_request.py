"""A request on its way through the levels: when it ends, by when it must, and what its rows remember."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapeshift.cascade.policy.routing import Answer
from shapeshift.cascade.service import ClassifyRequest, Row
from shapeshift.serving.parameters import RequestParameters

CLIENT: Any = None


def made(rows: int = 3, **options: Any) -> tuple[ClassifyRequest, list[ClassifyRequest]]:
    """A request, and each time that it ended."""
    ended: list[ClassifyRequest] = []
    return ClassifyRequest(CLIENT, [[b"a"]] * rows, [], RequestParameters(**options), ended.append), ended


@pytest.mark.parametrize(("latency_ms", "limit_s"), [(None, None), (250.0, 0.25), (0.0, 0.0)])
def test_the_deadline_is_the_arrival_and_the_limit(latency_ms: float | None, limit_s: float | None) -> None:
    request, _ = made(latency_ms=latency_ms)
    assert request.deadline == (None if limit_s is None else request.arrived + limit_s)


def test_a_request_ends_once_with_its_last_row() -> None:
    found, ended = made(3)
    for count, times in ((0, 0), (1, 0), (0, 0), (2, 1), (1, 1), (0, 1)):
        found.finish_rows(count)
        assert len(ended) == times
    found.fail(ValueError("late"))
    assert (ended, found.error) == ([found], None)


def test_a_request_that_failed_ends_no_second_time() -> None:
    found, ended = made(3)
    first = ValueError("first")
    found.fail(first)
    found.fail(ValueError("second"))
    found.finish_rows(3)
    assert (ended, found.error) == ([found], first)


def test_words_count_as_pruned_once_a_level_has_answered_without_them() -> None:
    row = Row([b"one two three"], [b"one two three"])
    assert (row.words_pruned, row.num_tokens, row.engine_ms, row.control_ms) == (0, 0, 0.0, 0.0)
    answers = [Answer(np.zeros(2), 0.5, level) for level in (1, 2, 3)]
    row.next_texts, row.next_pruned = [b"one two"], 1
    assert (row.texts, row.next_texts, row.words_pruned) == ([b"one two three"], [b"one two"], 0)
    row.record(answers[0], np.zeros(2))
    assert (row.texts, row.words_pruned, row.final) == ([b"one two"], 1, answers[0])
    row.record(answers[1], np.zeros(2))
    assert row.words_pruned == 1
    row.next_texts, row.next_pruned = [b"one"], 5
    row.record(answers[2], np.ones(2))
    assert (row.words_pruned, row.final) == (6, answers[2])
    assert row.ensemble is not None and row.ensemble.tolist() == [1.0, 1.0]
