"""Bounds of queues."""

from __future__ import annotations

import pytest

from shapeshift.errors import OverloadedError
from shapeshift.serving.bounds import Bound


def test_a_refusal_names_parameter_value_and_limit() -> None:
    bound = Bound("queue_rows", 8, "rows")
    bound.require(5, 3)
    with pytest.raises(OverloadedError) as caught:
        bound.require(5, 4)
    assert str(caught.value) == "queue_rows: 5 rows wait, 4 more would exceed 8; retry later"


def test_an_empty_queue_takes_any_request() -> None:
    bound = Bound("queue_tokens", 8, "tokens")
    bound.require_unless_empty(0, 100)
    with pytest.raises(OverloadedError, match="^queue_tokens: 1 tokens wait, 100 more"):
        bound.require_unless_empty(1, 100)
