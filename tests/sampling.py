"""Cases of which a usual run takes a few, and `make test-long` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, marked long but for those in `usual`, which must be cases too."""
    cases = list(cases)
    assert all(case in cases for case in usual), usual
    return [case if case in usual else pytest.param(case, marks=pytest.mark.long) for case in cases]
