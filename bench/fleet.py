"""Fronts with workers for benchmarks: their folders, the server, and the scheduler beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.systems import server_settings
from build_engines.plan import plan
from build_engines.publish import build
from build_engines.repository import front_models, generate
from build_engines.settings import FrontModel, Places
from shapeshift.errors import ShapeshiftError
from shapeshift.triton import modelconfig
from shapeshift.triton.metrics import Samples, scrape
from shapeshift.triton.server import TritonServer

BUILD = Path("build")
PROFILE = Path("profiles/minilm-openvino-f32-epyc-zen3.json")
_JOINED_S = 180.0


@dataclass(frozen=True)
class Measured:
    """A measured latency curve: of one text, by its tokens."""

    lengths: tuple[int, ...]
    latency_ms: tuple[float, ...]

    def at(self, tokens: int) -> float:
        """Milliseconds of a text of so many tokens."""
        return float(np.interp(tokens, self.lengths, self.latency_ms))


def measured(path: Path = PROFILE) -> Measured:
    """The curve in a file of `profiles/`."""
    given = json.loads(path.read_text())
    return Measured(tuple(given["lengths"]), tuple(given["latency_ms"]))


def emulated_front(house: Path, name: str, tokens: Sequence[int], **parameters: object) -> Path:
    """Build a front with emulated engines of the measured curve in `house`; the repository that serves it.

    tokens: lengths whose mix the first plan is made for, and `global` every one.
    """
    source = house / "source" / name
    source.mkdir(parents=True, exist_ok=True)
    config = modelconfig.read(Path("model_repository/encode/config.pbtxt"))
    config.name = name
    config.parameters.clear()
    curve = measured()
    (source / "profile.json").write_text(json.dumps({"lengths": curve.lengths, "latency_ms": curve.latency_ms}))
    (source / "lengths.json").write_text(json.dumps(np.bincount(tokens)[1:].tolist()))
    stated = {
        "length_histogram": "lengths.json",
        "checkpoint": str((BUILD / "checkpoints" / "all-MiniLM-L6-v2").resolve()),
        "provider": "emulated",
        "precision": "f32",
        "profile_file": "profile.json",
        "dynamic": "false",
        # As in the paper: an instance serves one text at a time.
        "packing": "false",
        "placement": "partitioned",
        **parameters,
    }
    for field, value in stated.items():
        modelconfig.set_parameter(config, field, str(value))
    modelconfig.write(config, source / "config.pbtxt")
    places = Places(Path.cwd(), (house / "build").resolve(), (house / "source").resolve())
    for front in front_models(places, {name}):
        assert isinstance(front, FrontModel)
        planned = plan(front, places)
        made = build(planned, places.engines / name, lambda step: None)
        generate(planned, places.engines / name, made, places)
    return places.generated


@dataclass(frozen=True)
class Running:
    """A server, and the scheduler that was started beside it."""

    server: TritonServer
    scheduler: list[str]
    process: list[subprocess.Popen[bytes]]

    @property
    def run_directory(self) -> Path:
        """Where server and scheduler keep their files."""
        return self.server.settings.run_directory

    def start_scheduler(self) -> None:
        """Start it, again if it was killed."""
        log = (self.run_directory / "scheduler.log").open("ab")
        self.process.append(subprocess.Popen(self.scheduler, stdout=log, stderr=log))

    def samples(self) -> Samples:
        """The metrics now; none while the server does not answer."""
        try:
            return scrape(self.server.metrics_url, timeout_s=5.0)
        except ShapeshiftError:
            return {}

    def wait_joined(self, front: str, workers: int) -> None:
        """Wait until the front gives texts to so many workers."""
        end = time.monotonic() + _JOINED_S
        while time.monotonic() < end:
            joined = [
                value
                for (name, labels), value in self.samples().items()
                if name == "shapeshift_workers_joined" and ("model", front) in labels
            ]
            if joined and joined[-1] >= workers:
                return
            time.sleep(0.2)
        raise ShapeshiftError(f"{front}: {workers} workers had not joined after {_JOINED_S:g} s")


@contextmanager
def fleet(
    house: Path, repositories: Sequence[Path], fronts: Mapping[str, int], period_s: float = 120.0
) -> Iterator[Running]:
    """A server with `fronts` (name: workers), its scheduler, and all workers joined."""
    settings = server_settings(tuple(fronts), repositories, BUILD, house / "run")
    with TritonServer(settings) as server:
        server.wait_ready(300)
        command = [sys.executable, "-m", "shapeshift.cli.main", "scheduler", "--build", str(house)]
        command += ["--server", server.grpc_url, "--metrics", server.metrics_url, "--plan-period", f"{period_s:g}"]
        command += [part for repository in repositories for part in ("--repository", str(repository))]
        running = Running(server, command, [])
        running.start_scheduler()
        try:
            for front, workers in fronts.items():
                if workers:
                    running.wait_joined(front, workers)
            yield running
        finally:
            for process in running.process:
                process.kill()
                process.wait()
