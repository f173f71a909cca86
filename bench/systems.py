"""The systems that a benchmark compares, started and stopped together."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.loads import Outcome
from bench.peers.http_load import closed_loop, open_loop
from bench.peers.infinity import Engine, Infinity
from build_engines import workers
from build_engines.repository import profile
from shapeshift.engines import manifest
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest
from shapeshift.errors import ShapeshiftError
from shapeshift.triton import modelconfig
from shapeshift.triton.metrics import scrape
from shapeshift.triton.server import TritonServer
from shapeshift.triton.settings import ServerSettings

_LOADED_S = 120.0


class Worker:
    """A `bench.worker` process."""

    def __init__(self, name: str, kind: str, folder: Path) -> None:
        self.name = name
        command = [sys.executable, "-m", "bench.worker", kind, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        assert self._process.stdin is not None
        asked = {"texts": list(texts), "concurrency": concurrency, "count": count}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        got = self._answer()
        return Outcome(np.array(got["latency_ms"]), got["per_second"])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: the worker process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class InfinityServer:
    """An infinity server, asked over HTTP by an asyncio client in this process."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = url

    def closed(self, texts: Sequence[str], concurrency: int, count: int) -> Outcome:
        load = asyncio.run(closed_loop(self._url, texts, concurrency, count=count))
        return Outcome(load.latencies * 1e3, load.rate)

    def open(self, texts: Sequence[str], instants: NDArray[np.float64]) -> Outcome:
        load = asyncio.run(open_loop(self._url, texts, instants.tolist()))
        return Outcome(load.latencies * 1e3, load.rate)


def derive(
    name: str,
    entries: Sequence[EngineEntry],
    repository: Path,
    build: Path,
    source: str = "encode",
    packs_rows: bool = False,
    parameters: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """A front model `name` with other engines of the same files: same weights, provider and precision.

    packs_rows: whether texts may share an engine call: that is ours, not the baselines'. parameters: changed in
    the generated config.pbtxt; the folders of workers are written, too.
    """
    made = manifest.load(build / "engines" / source)
    folder = build / "bench" / "engines" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(build / "engines" / source, folder, copy_function=lambda a, b: Path(b).hardlink_to(a))
    (folder / manifest.FILE_NAME).unlink()
    derived = replace(made, packs_rows=made.packs_rows and packs_rows, engines=tuple(entries))
    derived.save(folder)
    config = modelconfig.read(build / "repository" / source / "config.pbtxt")
    config.name = name
    modelconfig.set_parameter(config, "engines", str(folder.resolve()))
    stated = {"manifest_sha256": manifest.sha256(folder), "profile": json.dumps(profile(derived)), **parameters}
    for field, value in stated.items():
        modelconfig.set_parameter(config, field, value)
    (repository / name / "1").mkdir(parents=True)
    modelconfig.write(config, repository / name / "config.pbtxt")
    workers.generate(config, derived, repository)


def dynamic_only(made: Manifest) -> list[EngineEntry]:
    """DT: one engine for any shape."""
    return [entry for entry in made.engines if entry.tokens is None]


def padded(made: Manifest) -> list[EngineEntry]:
    """ST: one static engine of the longest length, to which every text is padded."""
    dynamic = dynamic_only(made)[0]
    longest = max(dynamic.latency, key=lambda point: point.tokens)
    return [
        replace(
            dynamic,
            tokens=made.max_tokens,
            rows=1,
            latency=(Latency(made.max_tokens, 1, longest.median_ms, longest.p99_ms, longest.best_ms),),
        )
    ]


@contextmanager
def triton(engines: Mapping[str, int], repositories: Sequence[Path], build: Path) -> Iterator[TritonServer]:
    """The project's own server with the models in `engines` (name: number of engines), all loaded, on free ports."""
    settings = server_settings(tuple(engines), repositories, build, build / "bench" / "run")
    with TritonServer(settings) as server:
        server.wait_ready(300)
        wait_loaded(server.metrics_url, sum(engines.values()))
        yield server


def server_settings(
    models: Sequence[str], repositories: Sequence[Path], build: Path, run_directory: Path
) -> ServerSettings:
    """The project's own server with `models`, on free ports."""
    ports = free_ports(3)
    return ServerSettings(
        repositories=tuple(repositories),
        models=tuple(models),
        backend_directories=(Path("backends"),),
        triton=build / "triton",
        run_directory=run_directory,
        http_port=ports[0],
        grpc_port=ports[1],
        metrics_port=ports[2],
    )


def wait_loaded(metrics_url: str, engines: int) -> None:
    """A process is ready with its first engine and loads the others beside the traffic: let all of them finish."""
    end = time.monotonic() + _LOADED_S
    while time.monotonic() < end:
        samples = scrape(metrics_url, timeout_s=5.0)
        if sum(value for (name, _), value in samples.items() if name == "shapeshift_engines_loaded") >= engines:
            return
        time.sleep(0.5)
    raise ShapeshiftError(f"the fronts had not loaded all {engines} engines after {_LOADED_S:g} s")


@contextmanager
def infinity(engines: Sequence[Engine], checkpoint: Path, build: Path) -> Iterator[list[InfinityServer]]:
    """One infinity server for each engine name."""
    with ExitStack() as stack:
        started = []
        for engine in engines:
            peer = stack.enter_context(Infinity(engine, checkpoint, build))
            started.append(InfinityServer(f"infinity {engine}", peer.url))
        yield started


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
