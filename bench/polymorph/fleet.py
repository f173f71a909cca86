"""Fronts with workers for benchmarks: their folders, their server, and its scheduler process."""

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

from bench.common.output import BUILD
from bench.common.server import running_server
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.front import publish
from shapeshift.errors import ShapeshiftError
from shapeshift.triton import model_config
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.metrics import Samples, scrape

PROFILE = Path("profiles/minilm-openvino-f32-epyc-zen3.json")
_JOINED_S = 180.0


@dataclass(frozen=True)
class LatencyCurve:
    """The measured latency of one text by its tokens."""

    lengths: tuple[int, ...]
    latency_ms: tuple[float, ...]

    def at(self, tokens: int) -> float:
        """Milliseconds of a text of so many tokens, by linear interpolation."""
        return float(np.interp(tokens, self.lengths, self.latency_ms))


def read_curve(path: Path = PROFILE) -> LatencyCurve:
    """The curve in a file of `profiles/`."""
    curve = json.loads(path.read_text())
    return LatencyCurve(tuple(curve["lengths"]), tuple(curve["latency_ms"]))


def emulated_front(folder: Path, name: str, tokens: Sequence[int], slower: float = 1.0, **parameters: object) -> Path:
    """Build a front with emulated engines of the measured curve in `folder`, and return its repository.

    tokens: lengths whose mix the first plan uses, and `global` uses for every plan; slower: factor on all latencies.
    """
    source = folder / "source" / name
    source.mkdir(parents=True, exist_ok=True)
    config = model_config.read(Path("model_repository/encode/config.pbtxt"))
    config.name = name
    config.parameters.clear()
    curve = read_curve()
    latency_ms = [slower * ms for ms in curve.latency_ms]
    (source / "profile.json").write_text(json.dumps({"lengths": curve.lengths, "latency_ms": latency_ms}))
    (source / "lengths.json").write_text(json.dumps(np.bincount(tokens)[1:].tolist()))
    settings = {
        "length_histogram": "lengths.json",
        "checkpoint": str((BUILD / "checkpoints" / "all-MiniLM-L6-v2").resolve()),
        "provider": "emulated",
        "precision": "f32",
        "profile_file": "profile.json",
        "dynamic": "false",
        # As in the paper, an instance serves one text at a time.
        "packing": "false",
        "placement": "partitioned",
        **parameters,
    }
    for field, value in settings.items():
        model_config.set_parameter(config, field, str(value))
    model_config.write(config, source / "config.pbtxt")
    paths = BuildPaths(Path.cwd(), (folder / "build").resolve(), (folder / "source").resolve())
    for front in front_models(paths, {name}):
        assert isinstance(front, TextFrontConfig)
        publish(front, paths, lambda step: None)
    return paths.generated


@dataclass(frozen=True)
class Fleet:
    """A running server with its scheduler."""

    server: TritonServer

    def samples(self) -> Samples:
        """The metrics now; empty while the server does not answer."""
        try:
            return scrape(self.server.metrics_url, timeout_s=5.0)
        except ShapeshiftError:
            return {}

    def wait_joined(self, front: str, workers: int) -> None:
        """Wait until the front dispatches texts to so many workers; ShapeshiftError after 3 minutes."""
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
        raise ShapeshiftError(f"model {front}: {workers} workers did not join within {_JOINED_S:g} s")


@contextmanager
def running_fleet(
    folder: Path, repositories: Sequence[Path], fronts: Mapping[str, int], period_s: float = 120.0
) -> Iterator[Fleet]:
    """A server with `fronts` (name: workers) and its scheduler; all workers have joined."""
    with running_server(tuple(fronts), repositories, folder / "run") as server:
        command = [sys.executable, "-m", "shapeshift.cli.main", "sidecar", "--build", str(folder)]
        command += ["--server", server.grpc_url, "--metrics", server.metrics_url, "--plan-period", f"{period_s:g}"]
        command += [part for repository in repositories for part in ("--repository", str(repository))]
        running = Fleet(server)
        with (server.settings.run_directory / "scheduler.log").open("ab") as log:
            scheduler = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for front, workers in fronts.items():
                if workers:
                    running.wait_joined(front, workers)
            yield running
        finally:
            scheduler.kill()
            scheduler.wait()
