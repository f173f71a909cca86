"""A tiny backend, a repository with models of it, and settings for servers on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shapeshift.triton.settings import ServerSettings

PROJECT = Path(__file__).resolve().parents[2]
BACKENDS = Path(__file__).resolve().parent / "backends"
TRITON = PROJECT / "build" / "triton"
CONFIG = """
backend: "echo"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""


@pytest.fixture(scope="session")
def triton() -> Path:
    """The unpacked server."""
    if not (TRITON / "bin" / "tritonserver").is_file():
        pytest.skip(f"no server in {TRITON}: run `make setup`")
    return TRITON


@pytest.fixture(scope="session")
def add_model() -> Callable[..., Path]:
    """A function that adds a model of the echo backend to a repository, and returns its folder."""

    def add(repository: Path, name: str, **parameters: str) -> Path:
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        entries = [
            f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()
        ]
        (folder / "config.pbtxt").write_text(f'name: "{name}"{CONFIG}' + "\n".join(entries))
        return folder

    return add


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, add_model: Callable[..., Path]) -> Path:
    """A folder with a repository of two echo models and space for run directories; one for each test module."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("echo", "echo_two"):
        add_model(folder / "repository", name)
    return folder


@pytest.fixture(scope="module")
def make_settings(
    triton: Path, project: Path, server_settings: Callable[..., ServerSettings]
) -> Callable[..., ServerSettings]:
    """Settings for one more server: new ports, and the run directory `run` of the project unless given."""

    def make(**changes: object) -> ServerSettings:
        settings = server_settings((project / "repository",), ("echo",), project / "run", BACKENDS)
        return replace(settings, **changes)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def traces_of() -> Callable[[ServerSettings], Callable[[], list[str]]]:
    """A function from the settings of a started server to a function that lists its present processes and
    shared-memory regions, without using the library."""

    def watch(settings: ServerSettings) -> Callable[[], list[str]]:
        prefix = json.loads(settings.record.read_text())["prefix"]
        return lambda: [*_processes(settings.run_directory), *_regions(prefix)]

    return watch


def _regions(prefix: str) -> list[str]:
    return [str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]


def _processes(run_directory: Path) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            files = [link.readlink() for link in (folder / "fd").iterdir()] if "guard" in line else []
            ours = run_directory / "server.lock" in files or str(run_directory) in line
            if ours and re.search("tritonserver|_stub|guard", line):
                found.append(f"{folder.name} {line}")
    return found
