"""Fronts with workers for benchmarks: their folders, their server, and its sidecar."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common.models import SHIPPED, write_front
from bench.common.output import BUILD
from bench.common.server import running_server
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.front import publish
from shapeshift.cli.sidecar import SidecarProcess
from shapeshift.errors import ShapeshiftError
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
    write_front(SHIPPED / "encode", source, settings, keeps=False)
    paths = BuildPaths(Path.cwd(), (folder / "build").resolve(), (folder / "source").resolve())
    for front in front_models(paths, {name}):
        assert isinstance(front, TextFrontConfig)
        publish(front, paths, lambda step: None)
    return paths.generated


def joined(page: Samples, front: str) -> float:
    """To how many workers the front sends texts."""
    name, label = "shapeshift_workers_joined", ("model", front)
    return sum(value for (series, labels), value in page.items() if series == name and label in labels)


@contextmanager
def running_fleet(
    folder: Path, repositories: Sequence[Path], fronts: Mapping[str, int], period_s: float = 120.0
) -> Iterator[TritonServer]:
    """A server with `fronts` (name: workers) and its sidecar; all workers have joined, else ShapeshiftError after 3
    minutes."""
    with (
        running_server(tuple(fronts), repositories, folder / "run") as server,
        SidecarProcess(server.settings, period_s) as sidecar,
    ):
        sidecar.start()
        end = time.monotonic() + _JOINED_S
        while any(joined(scrape(server.metrics_url, 5.0), front) < count for front, count in fronts.items()):
            if time.monotonic() > end:
                raise ShapeshiftError(f"the workers of {', '.join(fronts)} did not join within {_JOINED_S:g} s")
            time.sleep(0.2)
        yield server
