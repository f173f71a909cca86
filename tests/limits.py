"""Limits of parameters: the value at a limit is taken, the one just beyond is refused by the parameter's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError

Limits = Mapping[str, tuple[float, float]]
"""By parameter, the least or the most that it takes, and what is just beyond."""


def cases(*limits: Limits) -> list[tuple[str, float, float]]:
    """For `pytest.mark.parametrize`: the name, and the two values."""
    return [(name, within, beyond) for one in limits for name, (within, beyond) in one.items()]


def require_limit(make: Callable[..., Any], name: str, within: float, beyond: float) -> None:
    """make: the settings with these parameters."""
    assert getattr(make(**{name: within}), name) == within
    with pytest.raises(InvalidInputError, match=f"^{name}: got {beyond}"):
        make(**{name: beyond})
