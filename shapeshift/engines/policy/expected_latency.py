"""What one text costs on average by a profile."""

from __future__ import annotations

from collections.abc import Sequence


def expected_ms(curve_ms: Sequence[float], weights: Sequence[float]) -> float:
    """Milliseconds of one text alone, over the lengths that are expected.

    curve_ms: of a call by its tokens, [longest + 1]; weights: of texts of 1, 2, ... longest tokens, not all 0.
    """
    return sum(own * weight for own, weight in zip(curve_ms[1:], weights, strict=True)) / sum(weights)
