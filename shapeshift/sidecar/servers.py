"""What the sidecar watches and changes: one server, or by `shapeshift.fleet` all nodes of a fleet."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from numpy.typing import NDArray

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.sidecar.workers import ServerModelReader, ServerModels
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from shapeshift.triton.endpoint import Endpoint, tls_from_environment


class Changes(Protocol):
    """Model control: that of `triton.control.ModelControl`, or of all nodes. Thread-safe, except for `ready`."""

    def load(self, name: str, config: dict[str, Any] | None = None, timeout_s: float = 900.0) -> None: ...

    def unload(self, name: str, timeout_s: float = 30.0) -> None: ...

    def config(self, name: str) -> dict[str, Any]: ...

    def is_loaded(self, name: str) -> bool: ...

    def ready(self, names: Collection[str]) -> set[str]: ...


class ModelReader(Protocol):
    """Reads the present models: `workers.ServerModelReader`, or that of all nodes. gone: the nodes to plan around."""

    @property
    def gone(self) -> frozenset[str]: ...

    def forget(self, *models: str) -> None: ...

    def read(self) -> ServerModels: ...


Ask = Callable[[str, Mapping[str, NDArray[Any]], Sequence[str], Mapping[str, str], float], dict[str, NDArray[Any]]]
"""A request to a model, see `triton.control.ModelControl.ask`."""


@dataclass(frozen=True)
class Servers:
    """What one thread each calls: changes, models, metrics pages, versions by node beside the problems of the others.

    All raise ShapeshiftError where no server answers, but `versions`. The node of a single server has no name. ask: a
    single server's models; None: those of a fleet are not asked.
    """

    control: Changes
    reader: ModelReader
    scrape: Callable[[], MetricsPage]
    versions: Callable[[], tuple[Mapping[str, str], Mapping[str, str]]]
    ask: Ask | None = None


def connect(server: str, page: str, key: str) -> Servers:
    """To the server with model control at `server`, HOST:PORT, and its metrics page at the URL `page`.

    The environment names the certificates, if it asks for them.
    """
    tls = tls_from_environment()
    control = ModelControl(server, key, tls)
    # Else a process of this machine would be taken for one of the server's with the same pid.
    host = 0 if Endpoint(server).is_local else 1

    def scrape() -> MetricsPage:
        return MetricsPage(metrics.scrape(page, tls=tls), time.monotonic(), host=host)

    return Servers(control, ServerModelReader(control), scrape, partial(_versions, control), ask=control.ask)


def _versions(control: ModelControl) -> tuple[Mapping[str, str], Mapping[str, str]]:
    try:
        return {"": control.version()}, {}
    except ShapeshiftError as error:
        return {}, {"": str(error)}


class Fleet(Protocol):
    """A fleet, as its file describes it."""

    name: str

    def connect(self, settings: SidecarSettings, journal: Journal) -> Servers:
        """To its nodes, now and whenever they change. What is wrong with one is logged."""


def open_fleet(file: Path, node: str) -> Fleet:
    """The fleet of a fleet file, read as `node`, whose certificate is shown. Raises ShapeshiftError."""
    # By name: without a fleet nothing of it is imported.
    fleet = importlib.import_module("shapeshift.fleet.sidecar.fleet")
    return cast(Fleet, fleet.Fleet(file, node))
