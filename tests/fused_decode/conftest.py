"""Fixtures of the decode tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shapeshift.kernels import kernel_build
from tests.compiled import KERNELS
from tests.fakes import PbUtils, logger

if TYPE_CHECKING:
    from tests.fused_decode.decode_models import Tiny
    from tests.fused_decode.fronts import MakeFront
    from tests.fused_decode.toy import ToyRuntime


# Before a test imports torch: with cores that are in use elsewhere, tests would take minutes.
kernel_build.limit_spinning()


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """Where the compiled kernels are kept from one run of the tests to the next."""
    return KERNELS


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """A function that makes the tiny model of a family, once."""
    from tests.fused_decode.decode_models import make

    return cache(lambda name: make(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def toy() -> ToyRuntime:
    """Three slots."""
    from tests.fused_decode.toy import ToyRuntime

    return ToyRuntime(slots=3)


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def make_front(tmp_path: Path, toy: ToyRuntime, pb_utils: PbUtils) -> Iterator[MakeFront]:
    """A function that starts a front over the toy; every front is closed and checked when the test ends."""
    from shapeshift.fused_decode import loading
    from shapeshift.fused_decode.front import GenerateFront
    from tests.fused_decode.fronts import arguments
    from tests.fused_decode.toy import save_tokenizer

    started: list[GenerateFront] = []

    def make(front: type[GenerateFront] = GenerateFront, **parameters: object) -> GenerateFront:
        stated = {"max_length": toy.max_length, "checkpoint": save_tokenizer(tmp_path / "toy"), **parameters}
        args = arguments("generate", **stated)
        started.append(front(pb_utils, args, loading.load(args, logger(pb_utils.Logger.lines), lambda *_: toy)))
        return started[-1]

    yield make
    toy.open.set()
    for front in started:
        front.close()
        front.loop.check_integrity()
        assert front.loop.slots.used == len(front.loop.admission) == len(front.live) == len(front.watch) == 0
