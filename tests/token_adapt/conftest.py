"""One set of small engines for all tests of the room, since building them takes seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from token_tasks import front, places

from build_engines import images


@pytest.fixture(scope="session")
def small_house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose `classify_image` has engines over a small checkpoint."""
    root = tmp_path_factory.mktemp("house")
    images.publish(front(root), places(root), lambda step: None)
    return root


@pytest.fixture(scope="session")
def copy_house(small_house: Path) -> Callable[..., Path]:
    """A function that makes another project at `root` with the same engines, of a model of that name."""

    def copy(root: Path, name: str = "classify_image") -> Path:
        shutil.copytree(small_house / "checkpoints", root / "checkpoints")
        shutil.copytree(small_house / "build" / "engines" / "classify_image", root / "build" / "engines" / name)
        return root

    return copy


@pytest.fixture
def house(copy_house: Callable[..., Path], tmp_path: Path) -> Path:
    """Such a project for one test."""
    root = copy_house(tmp_path)
    assert not images.publish(front(root), places(root), lambda step: None)[1]
    return root
