"""`--cov` counts lines while tests run whose file imports what pyproject.toml measures, and not before.

Before Python 3.12 a process that counts takes half as long again for every line it runs: torch's exports, imports and
parsers too, of which nothing is measured. What modules run as they are imported counts: they are imported first.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import coverage
import pytest

PROJECT = Path(__file__).resolve().parents[1]


class CoverageScope:
    """A plugin beside pytest-cov's, in a process that runs tests."""

    def __init__(self) -> None:
        self._counter: coverage.Coverage | None = None
        self._is_counting = True
        self._counts = cache(self._imports_measured)
        self._measured = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        self._counter = coverage.Coverage.current()
        assert self._counter is not None
        patterns = self._counter.get_option("run:include")
        assert isinstance(patterns, list)
        folders = [pattern.removesuffix("/*") for pattern in patterns]
        for file in (file for folder in folders for place in PROJECT.glob(folder) for file in place.rglob("*.py")):
            # What needs Triton's own module, a test imports with a fake of it.
            with suppress(ImportError):
                importlib.import_module(".".join(file.relative_to(PROJECT).with_suffix("").parts))
        self._measured = "|".join(folder.replace("/", r"\.").replace("*", r"\w+") for folder in folders)
        self._count(False)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._count(self._counts(item.path))
        return (yield)

    def _imports_measured(self, file: Path) -> bool:
        return re.search(rf"\b(?:{self._measured})\b", file.read_text(encoding="utf-8")) is not None

    def _count(self, is_counting: bool) -> None:
        assert self._counter is not None
        if is_counting != self._is_counting:
            (self._counter.start if is_counting else self._counter.stop)()
            self._is_counting = is_counting
