"""A real Triton with front models of `make engines`, and `shapeshift gateway` before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from bench.common.front_variants import publish_with_template
from shapeshift.cli.gateway import child
from tests.gateway.conftest import HTTP
from tests.waiting import wait_for

if TYPE_CHECKING:
    from shapeshift.triton.embedded.server import TritonServer

BUILD = Path(__file__).resolve().parents[2] / "build"


@contextmanager
def serving(
    make_server: Callable[..., TritonServer], models: Sequence[str], run: Path, *more: Path
) -> Iterator[TritonServer]:
    """The server, ready, of models that are built, or lie in the repositories `more`. Skips the test without one."""
    repositories = (BUILD / "repository", *more)
    for model in models:
        if not any((one / model).is_dir() for one in repositories):
            pytest.skip(f"no {BUILD / 'repository' / model}: run `make engines`")
    with make_server(repositories, tuple(models), run) as server:
        yield server.wait_ready()


def with_template(model: str, name: str, template: str, repository: Path) -> None:
    """Add to a repository a model that is built, under another name and with another chat template."""
    if not (built := BUILD / "repository" / model).is_dir():
        pytest.skip(f"no {built}: run `make engines`")
    publish_with_template(model, name, template, repository)


@contextmanager
def gateway(server: TritonServer, port: int, models: int) -> Iterator[str]:
    """The URL of the command, as `shapeshift serve` starts it, once it lists so many models."""
    address = f"http://127.0.0.1:{port}"
    process = child(server.settings, port)
    with process:
        process.start()
        wait_for(lambda: len(models_of(address)) >= models, timeout_s=60, pause_s=0.1)
        yield address
    assert models_of(address) == [] and "Traceback" not in process.log.read_text()


def models_of(address: str) -> list[str]:
    """The ids that a gateway lists; none where it does not answer."""
    try:
        return [one["id"] for one in HTTP.get(f"{address}/v1/models").json()["data"]]
    except httpx2.HTTPError:
        return []
