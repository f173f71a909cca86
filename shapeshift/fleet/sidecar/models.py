"""The models of all nodes. Fronts of one name on several nodes are one front with the workers of all these nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shapeshift.fleet.sidecar.connections import FleetConnections, NodeServer
from shapeshift.fleet.sidecar.node_calls import NodeCalls, Presence, nobody_answers
from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.workers import ServerModelReader, ServerModels, Worker
from shapeshift.triton.names import qualified, split

T = TypeVar("T")

# Factor on the limit where every configuration is requested, not only the index.
_PATIENCE = 2.5


class FleetModelReader:
    """Reads the models of all nodes at once. One thread uses it. limit_s: see `NodeCalls`."""

    def __init__(self, connections: FleetConnections, presence: Presence, limit_s: float) -> None:
        self._connections = connections
        self._presence = presence
        self._calls: NodeCalls[ServerModels] = NodeCalls(limit_s)
        self._readers: dict[str, tuple[NodeServer, ServerModelReader]] = {}
        # By node: models whose configurations are to be requested again.
        self._forgotten: dict[str, set[str]] = {}
        self._knows_nothing = True

    @property
    def gone(self) -> frozenset[str]:
        """The nodes that are gone now. Any thread may ask."""
        return self._presence.gone

    def forget(self, *models: str) -> None:
        """Request the configurations of these models again; of all models if none is given."""
        if not models:
            self._readers, self._forgotten, self._knows_nothing = {}, {}, True
        for node, model in map(split, models):
            self._forgotten.setdefault(node, set()).add(model)

    def read(self) -> ServerModels:
        """The models of the nodes that answer. Raises ShapeshiftError if none does."""
        servers = self._connections.servers
        self._readers = {node: self._reader(node, server) for node, server in servers.items()}
        calls = {node: partial(_read, one, self._forgotten.get(node)) for node, (_, one) in self._readers.items()}
        models, problems = self._calls.ask(calls, _PATIENCE if self._knows_nothing else 1.0)
        self._knows_nothing = False
        for node in models:
            self._forgotten.pop(node, None)
        self._presence.record("models", models, problems)
        if not models:
            raise nobody_answers(problems)
        # Where all are gone, e.g. because no metrics page can be reached, those that answer here are all there is.
        gone = self._presence.gone
        present = {node: one for node, one in models.items() if node not in gone} or models
        return merged(present, frozenset(problems.keys() - gone))

    def _reader(self, node: str, server: NodeServer) -> tuple[NodeServer, ServerModelReader]:
        reader = self._readers.get(node)
        return reader if reader is not None and reader[0] is server else (server, ServerModelReader(server.control))


def _read(reader: ServerModelReader, forgotten: set[str] | None) -> ServerModels:
    if forgotten:
        reader.forget(*forgotten)
    return reader.read()


def merged(by_node: Mapping[str, ServerModels], pending: frozenset[str] = frozenset()) -> ServerModels:
    """The models of these nodes under qualified names. pending: see ServerModels."""

    def of_all(values: Callable[[ServerModels], Mapping[str, T]]) -> dict[str, T]:
        return {qualified(node, name): value for node, one in by_node.items() for name, value in values(one).items()}

    problems = of_all(lambda one: one.problems)
    fronts: dict[str, Front] = {}
    workers: dict[str, tuple[Worker, ...]] = {}
    for name in sorted({name for models in by_node.values() for name in models.fronts}):
        on_nodes = {node: models.fronts[name] for node, models in sorted(by_node.items()) if name in models.fronts}
        common, ignored = _common(on_nodes)
        problems |= {qualified(node, name): text for node, text in ignored.items()}
        alike = {node: front for node, front in on_nodes.items() if node not in ignored}
        fronts[name] = _joined(common, alike)
        if common.has_workers:
            workers[name] = tuple(
                replace(worker, name=qualified(node, worker.name))
                for node in alike
                for worker in by_node[node].workers.get(name, ())
            )
    states = of_all(lambda one: one.states)
    return ServerModels(fronts, workers, states, problems, frozenset(by_node), pending)


def _joined(common: Front, on_nodes: Mapping[str, Front]) -> Front:
    """One front: its numbers of workers are the sums of those of the nodes, its workers as fast as theirs together."""
    fronts = on_nodes.values()
    return replace(
        common,
        models=tuple(qualified(node, common.name) for node in on_nodes),
        workers=sum(front.workers for front in fronts),
        min_workers=sum(front.min_workers for front in fronts),
        max_workers=sum(front.max_workers for front in fronts),
        service_ms=tuple(
            _together(times, fronts) for times in zip(*(front.service_ms for front in fronts), strict=True)
        ),
    )


def _together(service_ms: Iterable[float], fronts: Iterable[Front]) -> float:
    """The service time with which as many equal workers give the rate of all, where machines differ."""
    counts = [max(1, front.workers) for front in fronts]
    return sum(counts) / sum(count / ms for count, ms in zip(counts, service_ms, strict=True))


def _common(on_nodes: Mapping[str, Front]) -> tuple[Front, dict[str, str]]:
    """The front as most nodes have it, and by node why the others' fronts are ignored."""
    shapes = {node: front.shape for node, front in on_nodes.items()}
    alike = {node: sum(shape == other for other in shapes.values()) for node, shape in shapes.items()}
    reference = max(alike, key=alike.__getitem__)
    ignored = {}
    for node, shape in shapes.items():
        differing = [name for name, value in shapes[reference].items() if shape[name] != value]
        if differing:
            ignored[node] = f"ignored: not as on node {reference} and most others: {', '.join(differing)}"
    return on_nodes[reference], ignored
