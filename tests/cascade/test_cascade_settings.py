"""The ranges of a cascade's parameters."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.cascade.settings import CascadeSettings, signature
from shapeshift.errors import InvalidInputError

# By parameter: the least and the most that it takes, and what is just beyond.
LEAST: dict[str, tuple[float, float]] = {
    "min_accuracy": (0.0, -0.01),
    "max_latency_ms": (0.0, -0.01),
    "engine_threads": (0, -1),
    "queue_rows": (1, 0),
    "queue_tokens": (1, 0),
    "max_queue_ms": (0.0, -0.01),
    "pack_tokens": (0, -1),
    "memory_mb": (1, 0),
    "call_threads": (1, 0),
    "queue_calls": (0, -1),
    "call_timeout_ms": (0.01, 0.0),
    "retry_ms": (0.01, 0.0),
    "slo_ms": (0.0, -0.01),
}
MOST: dict[str, tuple[float, float]] = {
    "min_accuracy": (1.0, 1.01),
    "engine_threads": (256, 257),
    "call_threads": (256, 257),
}


def made(**given: Any) -> CascadeSettings:
    return CascadeSettings("candidates", "task", **given)


@pytest.mark.parametrize(("name", "edge"), [*LEAST.items(), *MOST.items()])
def test_a_parameter_is_taken_to_its_limit_and_not_beyond(name: str, edge: tuple[float, float]) -> None:
    within, beyond = edge
    assert getattr(made(**{name: within}), name) == within
    with pytest.raises(InvalidInputError, match=name):
        made(**{name: beyond})


@pytest.mark.parametrize("pairs", [None, True, False])
def test_a_request_for_the_description_needs_no_input(pairs: bool | None) -> None:
    inputs = signature({}, pairs).inputs
    assert [one.name for one in inputs] == (["TEXT"] if pairs is False else ["TEXT", "TEXT_PAIR"])
    assert all(one.optional for one in inputs)
