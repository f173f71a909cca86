"""Fixtures: a real Triton with a front and workers of the test backend, and commands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings
from tests.sidecar.project import PATIENCE_S, Command, Project, RunningServer
from tests.sidecar.stubs import Stubs, stubs_in


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, server_settings: Callable[..., ServerSettings]) -> Project:
    return Project(tmp_path_factory.mktemp("project"), server_settings)


@pytest.fixture(scope="module")
def running(project: Project) -> Iterator[RunningServer]:
    with TritonServer(project.settings) as server:
        yield RunningServer(server.wait_ready(timeout_s=PATIENCE_S))


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    with stubs_in(tmp_path) as started:
        yield started


@pytest.fixture
def command(project: Project, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """A function that starts a command on the project. Commands that still run at the end of the test are killed."""
    started: list[Command] = []

    def start(name: str, *arguments: str, **options: Any) -> Command:
        log = tmp_path / f"{name}.{len(started)}.log"
        started.append(Command(log, name, "--build", str(project.build), *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
