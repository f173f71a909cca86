"""The project's own server, for the time of a measurement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.common.output import BUILD, FOLDER
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.embedded.free_ports import on_free_ports
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.metrics import scrape
from shapeshift.triton.settings import ServerSettings

_READY_S = 300
_LOADED_S = 600.0


@contextmanager
def running_server(
    models: Sequence[str], repositories: Sequence[Path], run_directory: Path = FOLDER / "run"
) -> Iterator[TritonServer]:
    """A server with `models` on free ports. A model is ready with its first engine and loads the others meanwhile."""
    settings = ServerSettings(
        repositories=tuple(repositories),
        models=tuple(models),
        backend_directories=(Path("backends"),),
        triton=BUILD / "triton",
        run_directory=run_directory,
    )
    with TritonServer(on_free_ports(settings)) as server:
        server.wait_ready(_READY_S)
        yield server


@contextmanager
def loaded_server(engines: Mapping[str, int], repositories: Sequence[Path]) -> Iterator[TritonServer]:
    """A server with the models in `engines` (name: number of engines), all of whose engines are loaded."""
    with running_server(tuple(engines), repositories) as server:
        wait_loaded(server.metrics_url, sum(engines.values()))
        yield server


def wait_loaded(metrics_url: str, engines: int) -> None:
    """Wait until the models of a server have loaded so many engines; ShapeshiftError after 10 minutes."""
    end = time.monotonic() + _LOADED_S
    while time.monotonic() < end:
        samples = scrape(metrics_url, timeout_s=5.0)
        if sum(value for (name, _), value in samples.items() if name == "shapeshift_engines_loaded") >= engines:
            return
        time.sleep(0.5)
    raise ShapeshiftError(f"the models have not loaded all {engines} engines within {_LOADED_S:g} s")
