"""What hypothesis draws for the seed of the fuzz run."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

SEED = 16


def drawn(strategy: SearchStrategy[Any], count: int) -> list[Any]:
    """At most `count` values: fewer where the strategy has no more different ones."""
    found: list[Any] = []

    @seed(SEED)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found
