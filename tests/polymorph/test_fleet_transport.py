"""A router whose workers are partly on other nodes: gRPC servers in this process, without Triton."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from shapeshift.engines.interfaces import Ids
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import EngineError, ModelDiedError, ModelGoneError, OverloadedError, ShapeshiftError
from shapeshift.fleet.grpc_transport import GrpcTransport, RemoteWorkerClient
from shapeshift.fleet.node import Members, Node
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.fleet.polling import NodePoll
from shapeshift.fleet.transport import FleetTransport, loaded_models
from shapeshift.polymorph.router import membership
from shapeshift.polymorph.router.transport import Transport, WrongBinError
from shapeshift.triton.endpoint import Endpoint
from tests.fleet.fake_node import FakeNode, Refusal, Tensors

if TYPE_CHECKING:
    from tests.polymorph.conftest import FakeWorker, FakeWorkers, Router

VERSION = 77
SHARED, DISPATCHED = 0, 512
STATUS: dict[type[ShapeshiftError], tuple[grpc.StatusCode, str]] = {
    ModelGoneError: (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: '{}' is not ready"),
    ModelDiedError: (grpc.StatusCode.INTERNAL, "Stub process '{}_0' is not healthy."),
    WrongBinError: (grpc.StatusCode.UNIMPLEMENTED, "LENGTHS: too long"),
    EngineError: (grpc.StatusCode.INTERNAL, "out of luck"),
}


class Site:
    """A fleet: the router's own node `here`, and others. version: of the engines that a node reports."""

    def __init__(self) -> None:
        self.nodes: dict[str, FakeNode] = {}
        self.version: dict[str, int] = {}
        self.workers: FakeWorkers
        self.now = Members()
        self.numbers = 6

    def reaching(self, nodes: Mapping[str, Sequence[FakeWorker]]) -> Callable[[FakeWorkers, Transport], Transport]:
        """For `make_router`: adds the workers `front_w00`, ... of other nodes."""

        def reach(workers: FakeWorkers, own: Transport) -> Transport:
            self.workers = workers
            for node, there in nodes.items():
                names = [f"front_w{number:02d}" for number in range(len(there))]
                workers.update({f"{node}/{name}": one for name, one in zip(names, there, strict=True)})
                self.nodes[node] = FakeNode({"front", "other_w00", *names}, self.infer(node))
                self.version[node] = VERSION
            self.state(*nodes)
            clients = NodeClients()
            made = _Made()
            remote = GrpcTransport(clients, RemoteWorkerClient(made))  # type: ignore[arg-type]
            poll = NodePoll(self, clients, "here", lambda line: None, loaded_models, period_s=0.02)
            return FleetTransport(own, remote, poll, "front")

        return reach

    def state(self, *names: str) -> None:
        """Which nodes are in the fleet."""
        addresses = {name: self.nodes[name].address for name in names} | {"here": "127.0.0.1:1"}
        self.now = Members([Node(name, Endpoint(at), f"http://{at}/metrics") for name, at in addresses.items()])

    def members(self) -> Members:
        return self.now

    def close(self) -> None:
        """Nothing is held."""

    def stop(self) -> None:
        for node in self.nodes.values():
            node.close()

    def infer(self, node: str) -> Callable[[str, Tensors], Tensors]:
        def infer(model: str, inputs: Tensors) -> Tensors:
            ends = np.cumsum(inputs["LENGTHS"])
            texts: list[Ids] = np.split(inputs["INPUT_IDS"], ends[:-1]) if len(ends) else []
            try:
                outputs, info = self.workers[f"{node}/{model}"].call(texts)
            except ShapeshiftError as error:
                code, text = STATUS[type(error)]
                raise Refusal(code, text.format(model)) from None
            state = [*info._replace(version=self.version[node])][: self.numbers]
            return {"EMBEDDING": outputs["EMBEDDING"], "STATE": np.array(state, np.int64)}

        return infer


class _Made:
    """Stands for the front's manifest."""

    outputs: Manifest | tuple[()] = ()

    def answers_version(self) -> int:
        return VERSION


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.stop()


@pytest.fixture
def make_worker_of() -> Callable[[int], FakeWorker]:
    from tests.polymorph.conftest import FakeWorker

    return FakeWorker


MakeRouter = Callable[..., "Router"]
MakeWorker = Callable[[int], "FakeWorker"]


@pytest.fixture
def threads_before() -> set[threading.Thread]:
    """The threads of this process before the test; other tests may have left some."""
    return set(threading.enumerate())


@pytest.fixture(params=[SHARED, DISPATCHED])
def router(
    request: pytest.FixtureRequest,
    make_router: MakeRouter,
    make_worker_of: MakeWorker,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
) -> Router:
    """With one worker of its own, `a`, and one on each of the nodes `x` and `y`; how far they are does not count."""
    monkeypatch.setattr(membership, "_RECENT_S", 1e12)
    edge = request.param
    there = {"x": [make_worker_of(edge)], "y": [make_worker_of(edge)]}
    return make_router(edge, timeout_s=5.0, reaching=site.reaching(there))


def test_workers_of_all_nodes_answer(router: Router, site: Site) -> None:
    asked = [router.ask(10, 60, 300) for _ in range(40)]
    assert [one.error() for one in asked] == [None] * 40
    assert all(worker.texts for worker in router.workers.values())
    assert router.joined("a", "x/front_w00", "y/front_w00")
    router.check_rest()


def test_a_node_that_leaves_finishes_its_calls_and_one_that_comes_back_serves(router: Router, site: Site) -> None:
    worker = router.workers["x/front_w00"]
    worker.stick()
    asked = [router.ask(300) for _ in range(12)]
    router.wait(lambda: worker.held >= 1)
    site.state("y")
    router.wait(lambda: router.joined("a", "y/front_w00"))
    worker.free()
    assert [one.error() for one in asked] == [None] * 12 and worker.texts
    site.state("x", "y")
    router.wait(lambda: router.joined(*router.workers))
    router.check_rest()


def test_a_node_that_dies_costs_no_request(router: Router, site: Site) -> None:
    worker = router.workers["x/front_w00"]
    worker.stick()
    asked = [router.ask(300) for _ in range(12)]
    router.wait(lambda: worker.held >= 1)
    port = site.nodes["x"].port
    dying = threading.Thread(target=site.nodes["x"].close)
    dying.start()
    assert [one.error() for one in asked] == [None] * 12
    worker.free()
    dying.join()
    router.wait(lambda: router.joined("a", "y/front_w00"))
    site.nodes["x"] = FakeNode(site.nodes["x"].models, site.infer("x"), port)
    router.wait(lambda: router.joined(*router.workers))
    router.check_rest()


@pytest.mark.parametrize("manner", ["sick", "failing", "gone"])
def test_what_a_remote_worker_refuses_another_one_serves(router: Router, manner: str) -> None:
    worker = router.workers["x/front_w00"]
    if manner == "gone":
        worker.ready = False
    else:
        worker.manner = manner
    assert [router.ask(100, 20).error() for _ in range(20)] == [None] * 20
    assert worker.texts == []
    worker.restart()
    router.wait(lambda: router.joined(*router.workers))
    router.check_rest()


def test_a_late_call_is_cancelled_on_its_node_and_retried(
    make_router: MakeRouter, make_worker_of: MakeWorker, site: Site
) -> None:
    slow = make_worker_of(0)
    router = make_router(0, timeout_s=0.3, reaching=site.reaching({"x": [slow]}))
    slow.stick()
    asked = [router.ask(100, 100) for _ in range(10)]
    assert [one.error() for one in asked] == [None] * 10
    router.wait(lambda: slow.held >= 1 and site.nodes["x"].cut_off >= 1)
    router.wait(lambda: router.joined("a") and router.timeouts("x/front_w00") >= 2)
    slow.free()
    router.wait(lambda: router.joined("a", "x/front_w00"))
    router.check_rest()


def test_a_node_that_answers_slowly_for_ever_serves_what_would_wait_longer_elsewhere(
    make_router: MakeRouter, make_worker_of: MakeWorker, site: Site
) -> None:
    slow = make_worker_of(0)
    slow.before = lambda texts: time.sleep(0.4)
    router = make_router(0, timeout_s=0.3, reaching=site.reaching({"x": [slow]}))
    # It joins although its first answer is late.
    router.wait(lambda: router.joined("a", "x/front_w00"))
    for _ in range(30):
        assert router.ask(100, 20).error() is None
    assert slow.texts == [] and router.members.workers["x/front_w00"].delay_ms > 200
    many = [router.ask(*[100] * 50) for _ in range(20)]
    assert [one.error() for one in many] == [None] * 20
    router.check_rest()


def test_a_worker_with_other_engines_is_not_used_and_its_node_is_named(router: Router, site: Site) -> None:
    site.version["x"] = VERSION + 1
    asked = [router.ask(100, 20) for _ in range(20)]
    assert [one.error() for one in asked] == [None] * 20
    router.wait(lambda: router.joined("a", "y/front_w00"))
    (line,) = [line for line in router.lines if "not used" in line]
    assert line.startswith("x/front_w00: not used: its engines are not those of this front")
    site.version["x"] = VERSION
    router.wait(lambda: router.joined(*router.workers))


def test_a_worker_of_an_older_version_is_not_used(router: Router, site: Site) -> None:
    site.numbers = 3
    router.wait(lambda: router.joined("a"))
    assert "x/front_w00: not used: its STATE has 3 numbers, not 6: it is of an older Shapeshift" in router.lines
    assert router.ask(100).error() is None
    # A newer one appends to its STATE.
    site.numbers = 6
    router.wait(lambda: router.joined(*router.workers))


def test_close_ends_calls_to_other_nodes(threads_before: set[threading.Thread], router: Router) -> None:
    for worker in router.workers.values():
        worker.stick()
    asked = [router.ask(300) for _ in range(9)]
    router.wait(lambda: all(worker.held for worker in router.workers.values()))
    router.close(timeout_s=0.2)
    assert all(isinstance(one.error(), OverloadedError) for one in asked)
    left = {thread.name for thread in set(threading.enumerate()) - threads_before}
    assert not left & {"grpc-client", "fleet-directory"}
