"""A real Triton with a front and workers that only beat, and commands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shapeshift.triton.server import TritonServer
from tests.scheduler.house import PATIENCE_S, TRITON, Command, House, Watched


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]) -> House:
    if not (TRITON / "bin" / "tritonserver").is_file():
        pytest.skip(f"no server in {TRITON}: run `make setup`")
    return House(tmp_path_factory.mktemp("house"), free_ports(3))


@pytest.fixture(scope="module")
def watched(house: House) -> Iterator[Watched]:
    with TritonServer(house.settings) as server:
        yield Watched(server.wait_ready(timeout_s=PATIENCE_S))


@pytest.fixture
def command(house: House, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """A function that starts a command on the house; what still runs at the end is killed."""
    started: list[Command] = []

    def start(name: str, *arguments: str, **options: Any) -> Command:
        log = tmp_path / f"{name}.{len(started)}.log"
        started.append(Command(log, name, "--build", str(house.build), *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
