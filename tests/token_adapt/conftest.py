"""One set of small engines for all tests of the package, because building them takes seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.build_engines.image import front as images
from tests.token_adapt.token_tasks import front, paths


@pytest.fixture(scope="session")
def small_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose `classify_image` has engines over a small checkpoint."""
    root = tmp_path_factory.mktemp("project")
    images.publish(front(root), paths(root), lambda step: None)
    return root


@pytest.fixture(scope="session")
def copy_project(small_project: Path) -> Callable[..., Path]:
    """A function that creates a project at `root` with the same engines, for a model `name`."""

    def copy(root: Path, name: str = "classify_image") -> Path:
        shutil.copytree(small_project / "checkpoints", root / "checkpoints")
        shutil.copytree(small_project / "build" / "engines" / "classify_image", root / "build" / "engines" / name)
        return root

    return copy


@pytest.fixture
def project(copy_project: Callable[..., Path], tmp_path: Path) -> Path:
    """A project like `small_project` for one test."""
    root = copy_project(tmp_path)
    assert images.publish(front(root), paths(root), lambda step: None)[1] == "up to date"
    return root
