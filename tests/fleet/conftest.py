"""A fleet of real nodes with emulated engines, and the files of its TLS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shapeshift.fleet import certificates
from shapeshift.fleet import settings as fleet_settings
from shapeshift.fleet.settings import FleetSettings

PROJECT = Path(__file__).resolve().parents[2]
BUILD = PROJECT / "build"
TLS = '[tls]\nca = "tls/ca.pem"\ncertificate = "tls/{node}.pem"\nkey = "tls/{node}.key"\n'
NODE = """
[[nodes]]
name = "{name}"
grpc = "{host}:{grpc}"
metrics = "https://{host}:{metrics}/metrics"
key_file = "{name}.control-key"
"""


@dataclass
class Nodes:
    """Nodes that `shapeshift serve --fleet` runs. file: the fleet file; build: with the models and the run folders."""

    file: Path
    build: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def settings(self, node: str) -> FleetSettings:
        """The fleet file as `node` reads it."""
        return fleet_settings.read(self.file, node)

    def start(self, name: str) -> None:
        """Start the node; its output goes to NAME.log beside the fleet file."""
        options = [f"--fleet={self.file}", f"--node={name}", f"--build={self.build}", f"--triton={BUILD / 'triton'}"]
        with (self.file.parent / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "shapeshift.cli.main", "serve", "--models=encode", *options],
                stdout=log,
                stderr=log,
                cwd=PROJECT,
            )

    def log(self, name: str) -> str:
        """What the node has written."""
        return (self.file.parent / f"{name}.log").read_text(errors="replace")


def write_fleet(folder: Path, names: str, ports: list[int]) -> Path:
    """A fleet file with mutual TLS in `folder`: for each letter of `names` a node at 127.0.0.1, 127.0.0.2, ...

    Each takes two of `ports`.
    """
    nodes = []
    for own, name in enumerate(names):
        host = f"127.0.0.{1 + own}"
        certificates.ensure(folder / "tls", name, [host])
        nodes.append(NODE.format(name=name, host=host, grpc=ports[2 * own], metrics=ports[2 * own + 1]))
    file = folder / "fleet.toml"
    file.write_text(f'name = "demo"\n{TLS}{"".join(nodes)}')
    return file


@pytest.fixture(scope="session")
def emulated_build(
    tmp_path_factory: pytest.TempPathFactory,
    add_front: Callable[..., Path],
    build_fronts: Callable[[Path, Path], Path],
) -> Path:
    """A build folder with the front `encode`, whose engines only imitate."""
    folder = tmp_path_factory.mktemp("fleet-build")
    if not (BUILD / "triton" / "bin" / "tritonserver").is_file():
        pytest.skip(f"no server in {BUILD / 'triton'}: run `make setup`")
    add_front(folder / "model_repository", "encode", (2, 6), bins="16,64")
    build_fronts(folder / "model_repository", folder / "build")
    return folder / "build"


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, emulated_build: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[Nodes]:
    """Two nodes, `a` and `b`, that were started; they load for some seconds still."""
    folder = tmp_path_factory.mktemp("fleet")
    found = Nodes(write_fleet(folder, "ab", free_ports(4)), emulated_build, {})
    try:
        for name in "ab":
            found.start(name)
        yield found
    finally:
        for process in found.processes.values():
            process.terminate()
        for process in found.processes.values():
            process.wait(timeout=120)
