"""Fixtures of the decode tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shapeshift.fused_decode.model import kernel_build

if TYPE_CHECKING:
    from tests.fused_decode.decode_models import Tiny

PROJECT = Path(__file__).resolve().parents[2]

# Before a test imports torch: with cores that are in use elsewhere, tests would take minutes.
kernel_build.limit_spinning()


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """Where the compiled kernels are kept from one run of the tests to the next."""
    return PROJECT / "build" / "kernels"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """A function that makes the tiny model of a family, once."""
    from tests.fused_decode.decode_models import make

    return cache(lambda name: make(name, tmp_path_factory.mktemp(name)))
