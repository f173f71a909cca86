"""How many nodes the fronts want that fill whole nodes, by hand-made pages of two nodes or three."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shapeshift.fleet.policy.node_count import NodeUse, WorkerDemand, wanted_nodes
from shapeshift.fleet.sidecar.demands import KV_USAGE, SLOTS, NodeDemand
from shapeshift.fleet.sidecar.models import merged
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.workers import ServerModelReader, ServerModels
from tests.docs.docs_sources import declared_metrics
from tests.sidecar.fakes import FakeServer, config, cumulative, samples

SLOW, FAST = {300.0: 100.0}, {150.0: 100.0}


class Case:
    """Nodes with `generate`, which has 8 slots, and `classify`, which has an objective of 300 ms."""

    def __init__(self, nodes: str = "ab") -> None:
        self.nodes = nodes
        self.now, self.beats = 1000.0, 0.0
        self.latencies = dict.fromkeys((150.0, 285.0, 300.0), 0.0)
        self.demand = NodeDemand(10.0)
        self.pending: frozenset[str] = frozenset()
        self.seconds()

    def server(self) -> ServerModels:
        found = {}
        for node in self.nodes:
            server = FakeServer()
            server.loaded["generate"] = config("generate", max_concurrency=8)
            server.loaded["classify"] = config("classify", slo_ms=300)
            server.loaded["generate_unary"] = config("generate_unary", slo_ms=1)
            server.loaded["other"] = config("other")
            server.files = dict(server.loaded)
            found[node] = ServerModelReader(server).read()
        return merged(found, self.pending)

    def seconds(
        self,
        count: int = 1,
        running: Mapping[str, float] | None = None,
        waiting: float = 0.0,
        kv_usage: float = 0.0,
        latencies: Mapping[float, float] | None = None,
    ) -> Mapping[str, WorkerDemand]:
        """So many seconds, each with these answers of `classify` on node a, and these gauges of `generate`."""
        found: Mapping[str, WorkerDemand] = {}
        for _ in range(count):
            self.now += 1.0
            self.beats += 1.0
            self.latencies = {le: total + (latencies or {}).get(le, 0.0) for le, total in self.latencies.items()}
            pages = []
            for node in self.nodes:
                gauges = {"running": {"": (running or {}).get(node, 0.0)}, "waiting": {"": waiting}}
                slots = {"slots": {"": 8.0}, "kv_usage": {"": kv_usage}}
                own = samples("generate", 1, self.beats, **gauges, **slots)
                answers = self.latencies if node == "a" else dict.fromkeys(self.latencies, 0.0)
                own |= samples("classify", 2, self.beats, latencies=cumulative(answers), waiting={"": 0.0})
                own |= samples("generate_unary", 3, self.beats, latencies=cumulative({300.0: 0.0}))
                pages.append(MetricsPage(own, self.now, node))
            page = MetricsPage.joined(pages, self.now, frozenset(self.nodes))
            found = dict(self.demand.step(self.server(), page))
        return found

    def wanted(self, name: str, count: int, **load: object) -> int:
        found = self.seconds(count, **load)[name]  # type: ignore[arg-type]
        assert found.per_node == 1
        return found.workers


def test_a_front_that_is_late_wants_a_node_more_and_after_a_minute_of_rest_one_fewer() -> None:
    case = Case()
    assert case.wanted("classify", 10, latencies=SLOW) == 3
    assert case.wanted("classify", 10, latencies={285.0: 100.0}) == 2
    assert case.wanted("classify", 59, latencies=FAST) == 2
    assert case.wanted("classify", 10, latencies=FAST) == 1
    assert case.wanted("classify", 10, latencies=SLOW) == 3, "at once"


def test_requests_that_fill_the_slots_of_all_nodes_want_another_node() -> None:
    case = Case()
    assert case.wanted("generate", 10, running={"a": 8.0, "b": 4.0}) == 2
    assert case.wanted("generate", 10, running={"a": 8.0, "b": 8.0}) == 3
    assert case.wanted("generate", 10, running={"a": 8.0, "b": 4.0}, waiting=2.0) == 3, "those that wait count"
    assert case.wanted("generate", 10, running={"a": 1.0}, kv_usage=0.97) == 3


def test_a_single_full_moment_wants_nothing() -> None:
    case = Case()
    case.seconds(9, running={"a": 1.0})
    assert case.wanted("generate", 1, running={"a": 8.0, "b": 8.0}, waiting=8.0) == 2


def test_a_node_goes_only_where_the_others_have_room_for_what_it_holds() -> None:
    case = Case()
    # 40% of two nodes are 80% of one.
    assert case.wanted("generate", 120, running={"a": 4.0, "b": 2.4}) == 2
    assert case.wanted("generate", 80, running={"a": 2.0, "b": 1.0}) == 1
    three = Case("abc")
    assert three.wanted("generate", 80, running={"a": 8.0, "b": 2.0}) == 3
    assert three.wanted("generate", 80, running={"a": 4.0, "b": 2.0}) == 2


def test_a_node_that_joins_or_leaves_begins_a_new_period() -> None:
    case = Case()
    assert case.wanted("generate", 80, running={"a": 1.0}) == 1
    case.nodes = "abc"
    assert case.wanted("generate", 59, running={"a": 1.0}) == 3
    case.nodes = "a"
    assert case.wanted("generate", 200, running={"a": 1.0}) == 1


def test_nothing_changes_while_a_node_is_late() -> None:
    case = Case()
    assert case.wanted("classify", 10, latencies=SLOW) == 3
    case.nodes, case.pending = "a", frozenset("b")
    assert case.wanted("classify", 30, latencies=FAST) == 3


def test_models_that_are_no_fronts_want_nothing() -> None:
    assert set(Case().seconds(30)) == {"generate", "classify"}


@pytest.mark.parametrize(
    ("use", "fast_since_s", "wanted"),
    [
        (NodeUse(0.95, None), 0.0, 4),
        (NodeUse(0.94, None), 0.0, 3),
        (NodeUse(0.1, 0.95), 0.0, 4),
        (NodeUse(0.4, 0.3), 60.0, 2),
        (NodeUse(0.4, 0.3), 59.0, 3),
        (NodeUse(0.5, 0.3), 60.0, 3),
        (NodeUse(None, None), 1000.0, 3),
    ],
)
def test_target_tracking_of_nodes(use: NodeUse, fast_since_s: float, wanted: int) -> None:
    assert wanted_nodes(use, fast_since_s, 3) == wanted


def test_what_is_read_is_exported() -> None:
    for name in (SLOTS, KV_USAGE):
        assert declared_metrics()[name][0] == "gauge"


def test_an_invalid_objective_is_none() -> None:
    for stated in ("soon", "-1", "inf", "nan", ""):
        server = FakeServer()
        server.loaded["generate"] = server.files["generate"] = config("generate", slo_ms=stated)
        assert ServerModelReader(server).read().objectives == {"generate": 0.0}
