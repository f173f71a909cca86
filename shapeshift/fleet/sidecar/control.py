"""Model control of all nodes: models are named `node/model`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.fleet.sidecar.connections import FleetConnections
from shapeshift.fleet.sidecar.node_calls import NodeCalls, Presence, nobody_answers
from shapeshift.sidecar.workers import READY, Control
from shapeshift.triton.names import qualified, split

T = TypeVar("T")

_LOOK_S = 0.5
_MOST_CHANGES = 1024


class FleetControl:
    """Changes models through the model control of their nodes. Thread-safe, except for `ready`.

    A change on a node that is gone fails at once. limit_s: see `NodeCalls`, for `ready`.
    """

    def __init__(self, connections: FleetConnections, presence: Presence, limit_s: float) -> None:
        self._connections = connections
        self._presence = presence
        self._questions: NodeCalls[set[str]] = NodeCalls(limit_s)
        self._changes = ThreadPoolExecutor(_MOST_CHANGES, thread_name_prefix="change")

    def load(self, name: str, config: dict[str, Any] | None = None, timeout_s: float = 900.0) -> None:
        """As `ModelControl.load`."""
        self._change(name, lambda control, model: control.load(model, config, timeout_s))

    def unload(self, name: str, timeout_s: float = 30.0) -> None:
        """As `ModelControl.unload`."""
        self._change(name, lambda control, model: control.unload(model, timeout_s))

    def config(self, name: str) -> dict[str, Any]:
        """The configuration of the loaded model. Raises ShapeshiftError."""
        control, model = self._find(name)
        return control.config(model)

    def is_loaded(self, name: str) -> bool:
        """Whether the model is ready. Raises ShapeshiftError if its node does not answer."""
        control, model = self._find(name)
        return model in _ready(control)

    def ready(self, names: Collection[str]) -> set[str]:
        """Those of the models that are ready, on the nodes that answer in time. One thread calls it.

        Raises ShapeshiftError if no node answers.
        """
        servers = self._connections.servers
        controls = {node: servers[node].control for node in {split(name)[0] for name in names} & servers.keys()}
        ready, problems = self._questions.ask({node: partial(_ready, control) for node, control in controls.items()})
        if not ready:
            raise nobody_answers(problems)
        return {name for name in names if split(name)[1] in ready.get(split(name)[0], ())}

    def _find(self, name: str) -> tuple[Control, str]:
        node, model = split(name)
        server = self._connections.servers.get(node)
        if server is None:
            raise NotFoundError(f"{qualified(node, model)}: node {node} is not a member of the fleet")
        return server.control, model

    def _change(self, name: str, change: Callable[[Control, str], T]) -> T:
        control, model = self._find(name)
        node, _ = split(name)
        call = self._changes.submit(change, control, model)
        while True:
            try:
                return call.result(_LOOK_S)
            except TimeoutError:
                # The network may have gone, not the server: then the call would hang until its time limit.
                if not call.done() and node in self._presence.gone:
                    raise ShapeshiftError(f"node {node} does not answer") from None


def _ready(control: Control) -> set[str]:
    return {entry.name for entry in control.index() if entry.state == READY}
