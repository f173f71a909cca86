"""One plan for the workers of all nodes, with fake nodes and a fake clock."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.plan_loop import PlanLoop
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.metrics import Samples
from shapeshift.triton.model_state import ModelState
from shapeshift.triton.names import split
from tests import waiting
from tests.fakes import logger
from tests.sidecar.fakes import PROFILE, SERVICE_MS, FakeServer, cumulative, samples
from tests.sidecar.fleet import FakeFleet

Lengths = dict[float, float]
NODES = ("a", "b", "c")
EVEN = {32.0: 0.0, 128.0: 0.0, 512.0: 0.0}
SHORT = {32.0: 50_000.0, 512.0: 50.0}
LONG = {512.0: 3000.0}


def node_server(*fronts: str, **changes: object) -> FakeServer:
    server = FakeServer()
    for front in fronts or ("enc",):
        server.add_front(front, **{"models": 4, **changes})  # type: ignore[arg-type]
    return server


class Case:
    """A plan loop over the nodes a, b and c. `period` lets time pass; every step scrapes and plans once."""

    def __init__(self, **servers: FakeServer) -> None:
        self.servers = servers or {node: node_server() for node in NODES}
        self.now, self.beats = 1000.0, 0.0
        self.totals: dict[str, Lengths] = {}
        self.log: list[str] = []
        self.blocked = ""
        pages = {node: self._scrape_of(node) for node in (*NODES, "d")}
        self.fleet = FakeFleet(self.servers, self.log, pages, lambda: self.now)
        self.begin()

    def begin(self) -> None:
        self.page: MetricsPage | None = None
        self.fleet.reader.forget()
        journal = Journal(logger(self.log), lambda values: None, {})
        self.actuator = Actuator(self.fleet.control, (), journal, lambda: self.blocked)
        self.loop = PlanLoop(
            SidecarSettings(),
            self.fleet.reader,
            self.actuator,
            journal,
            lambda: self.page,
            lambda: self.now,
        )

    def _scrape_of(self, node: str) -> Callable[[], Samples]:
        def scrape() -> Samples:
            self.servers[node].require_up()
            found: Samples = {}
            for number, model in enumerate(sorted(self.servers[node].loaded)):
                lengths = cumulative(self.totals.get(f"{node}/{model}", EVEN))
                found |= samples(model, 100 + number, self.beats, lengths=lengths, latencies=cumulative({300.0: 0.0}))
            return found

        return scrape

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.0
            self.beats += 1.0
            self.page = self.fleet.scrape()
            self.loop.step()

    def period(self, **arrived: Lengths) -> None:
        """Two minutes in which these texts arrive: by node, or by `node/front`."""
        self.now += 119.0
        self.beats += 119.0
        for where, lengths in arrived.items():
            front = where.replace("_", "/") if "_" in where else f"{where}/enc"
            before = self.totals.get(front, EVEN)
            self.totals[front] = {bound: count + lengths.get(bound, 0.0) for bound, count in before.items()}
        self.step()

    def bins(self, front: str = "enc") -> dict[str, str]:
        return {
            f"{node}/{worker}": bin_ for node, one in self.servers.items() for worker, bin_ in one.bins(front).items()
        }

    def on(self, node: str) -> int:
        return sum(split(worker)[0] == node for worker in self.bins())

    def logged(self, text: str) -> int:
        return sum(text in line for line in self.log)


@pytest.fixture
def case() -> Case:
    found = Case()
    found.step()
    return found


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event for which a fake node waits until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_the_first_plan_is_one_for_the_workers_of_all_nodes(case: Case) -> None:
    assert [case.on(node) for node in NODES] == [4, 4, 4]
    assert case.logged("plan enc: no traffic yet, by plan_histogram") == 1
    assert case.logged("load a/enc_w00 with") == case.logged("load c/enc_w03 with") >= 1
    # A node that is lost takes no bin with it.
    assert {split(worker)[0] for worker, bin_ in case.bins().items() if bin_ == "512"} == set(NODES)


def test_traffic_of_all_fronts_makes_one_plan(case: Case) -> None:
    case.period(a=LONG)
    assert set(case.bins().values()) == {"512"}
    case.period(a={32.0: 20_000.0}, b={32.0: 20_000.0}, c={512.0: 50.0})
    found = Counter(case.bins().values())
    assert found["32"] > found["512"] >= 1


def test_a_lost_node_is_planned_around_within_three_steps_and_planned_for_again(case: Case) -> None:
    case.period(a=SHORT)
    for worker in case.servers["c"].loaded:
        if "_w" in worker:
            case.servers["c"].load(worker, {"parameters": {"bin": {"string_value": "512"}}})
    for node in ("a", "b"):
        for worker in case.servers[node].bins():
            case.servers[node].load(worker, {"parameters": {"bin": {"string_value": "32"}}})
    case.begin()
    case.step(2)
    case.servers["c"].down = True
    case.step(3)
    left = [bin_ for worker, bin_ in case.bins().items() if split(worker)[0] != "c"]
    assert len(left) == 8
    assert "512" in left
    assert case.logged("node c: does not answer, and is planned around: no server answers") == 1
    assert case.logged("plan enc: node c is lost") == 1
    case.servers["c"].restart()
    case.servers["c"].down = False
    case.step(4)
    assert case.logged("node c: answers again") == 1
    assert case.logged("plan enc: node c has joined") == 1
    assert case.on("c") == 4


def test_one_missing_answer_changes_nothing(case: Case) -> None:
    calls = {node: list(server.calls) for node, server in case.servers.items()}
    case.servers["b"].down = True
    case.step()
    case.servers["b"].down = False
    case.step(3)
    assert {node: server.calls for node, server in case.servers.items()} == calls
    assert case.logged("node b") == 0


def test_a_node_that_joins_gets_workers_and_one_that_leaves_is_forgotten(case: Case) -> None:
    case.servers["d"] = node_server()
    case.fleet.join("d", case.servers["d"])
    case.step(2)
    assert case.on("d") == 4
    case.fleet.leave("d")
    case.step(2)
    assert case.logged("plan enc: node d is lost") == 1
    assert [case.on(node) for node in NODES] == [4, 4, 4]


def test_a_node_that_hangs_holds_up_no_other(case: Case, never: threading.Event) -> None:
    def hang(timeout_s: float = 5.0) -> list[ModelState]:
        never.wait()
        return []

    case.servers["b"].index = hang  # type: ignore[method-assign]
    case.step(3)
    assert case.logged("node b: does not answer, and is planned around: ") == 1
    case.period(a=LONG)
    assert {bin_ for worker, bin_ in case.bins().items() if split(worker)[0] != "b"} == {"512"}


def hanging(case: Case, never: threading.Event) -> Callable[[str, str], str | None]:
    """A load that does not return; in the first one node b goes."""

    def load(name: str, bin_: str) -> str | None:
        gone = case.servers["b"]
        if not gone.down:
            gone.down = True
            for _ in range(2):
                case.fleet.scrape()
        never.wait()
        return None

    return load


def test_a_load_on_a_node_that_goes_does_not_hang(case: Case, never: threading.Event) -> None:
    case.servers["b"].fails = hanging(case, never)
    case.period(a=LONG)
    # The plan did not wait for it.
    waiting.wait_for(lambda: case.logged("change b/enc_w") >= 1 and case.logged("node b does not answer") >= 1)
    case.step(3)
    assert {bin_ for worker, bin_ in case.bins().items() if split(worker)[0] != "b"} == {"512"}


def test_a_slow_load_does_not_delay_the_plan_without_a_lost_node(case: Case, never: threading.Event) -> None:
    case.servers["a"].fails = hanging(case, never)
    case.period(a=LONG)
    case.step(2)
    assert case.logged("plan enc: node b is lost") == 1
    assert {bin_ for worker, bin_ in case.bins().items() if split(worker)[0] == "c"} == {"512"}
    (running,) = case.actuator.changing
    never.set()
    waiting.wait_for(lambda: not case.actuator.changing)
    assert case.bins()[running] == "512"


@pytest.mark.parametrize(("name", "value"), [("slo_ms", 500), ("answers_version", 7)], ids=["slo", "engines"])
def test_a_node_with_other_settings_or_engines_is_named_and_left_out(name: str, value: object) -> None:
    case = Case(a=node_server(), b=node_server(**{name: value}), c=node_server())
    case.step()
    assert [case.on(node) for node in NODES] == [4, 0, 4]
    assert case.logged(f"config b/enc: ignored: not as on node a and most others: {name}") == 1


def test_nodes_whose_machines_are_not_equally_fast_are_planned_for_together() -> None:
    slower = json.loads(json.dumps(PROFILE))
    for engine in slower["engines"]:
        engine["latency"] = [[tokens, *(4 * ms for ms in times)] for tokens, *times in engine["latency"]]
    case = Case(a=node_server(), b=node_server(profile=json.dumps(slower), models=2, workers=2), c=node_server())
    case.step()
    assert [case.on(node) for node in NODES] == [4, 2, 4]
    assert not any("ignored" in line for line in case.log)
    # Ten such workers do what eight fast ones and two slow ones do: 8 / s + 2 / 4 s in all.
    found = case.fleet.reader.read().fronts["enc"].service_ms
    assert found == pytest.approx([10 / 8.5 * own for own in SERVICE_MS])


def test_a_node_that_answers_slowly_for_ever_is_planned_for_like_the_others(case: Case) -> None:
    real = case.servers["b"].require_up

    def slowly() -> None:
        time.sleep(0.05)
        real()

    case.servers["b"].require_up = slowly  # type: ignore[method-assign]
    case.period(a=SHORT, b=SHORT, c=SHORT)
    assert [case.on(node) for node in NODES] == [4, 4, 4]
    assert not case.logged("node b")


def test_nodes_may_have_different_numbers_of_workers() -> None:
    case = Case(a=node_server(), b=node_server(models=2, workers=2), c=node_server(models=6, workers=6))
    case.step()
    assert [case.on(node) for node in NODES] == [4, 2, 6]


def test_the_first_plan_loads_as_many_workers_at_once_on_each_node_as_on_one() -> None:
    case = Case()
    loading, all_loading = Counter[str](), threading.Barrier(12)
    for node, server in case.servers.items():
        server.fails = lambda name, bin_, node=node: _joined(all_loading, loading, node)  # type: ignore[misc]
    case.step()
    # Each is loaded as it is, which shows its configuration, and then with its bin.
    assert loading == {"a": 8, "b": 8, "c": 8}


def _joined(barrier: threading.Barrier, loading: Counter[str], node: str) -> str | None:
    barrier.wait(120)
    loading[node] += 1
    return None


def test_the_workers_of_each_front_start_evenly_on_the_nodes() -> None:
    changes = {"models": 4, "workers": 2, "min_workers": 1, "max_workers": 4}
    case = Case(**{node: node_server(**changes) for node in NODES})
    case.step()
    assert [case.on(node) for node in NODES] == [2, 2, 2]


def test_a_frozen_fleet_is_planned_for_when_it_thaws(case: Case) -> None:
    case.servers["d"] = node_server()
    case.blocked = "frozen"
    case.fleet.join("d", case.servers["d"])
    case.step(3)
    assert case.on("d") == 0
    assert case.logged("(frozen: not applied)") == 1
    case.blocked = ""
    case.step()
    assert case.on("d") == 4


def test_no_node_at_all_keeps_the_plan(case: Case) -> None:
    bins = case.bins()
    for server in case.servers.values():
        server.down = True
    assert case.loop.step() is None
    for server in case.servers.values():
        server.down = False
        server.restart()
    case.step(2)
    assert case.bins() == bins
