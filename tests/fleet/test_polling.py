"""What a process knows of the other nodes, over nodes without Triton."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from shapeshift.errors import ModelGoneError, ShapeshiftError
from shapeshift.fleet.node import Members, Node
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.fleet.polling import NodePoll
from shapeshift.fleet.transport import loaded_models
from shapeshift.triton.async_client import ModelCall
from shapeshift.triton.endpoint import Endpoint
from tests.fleet.fake_node import FakeNode, Tensors
from tests.waiting import wait_for as wait

wait_for = partial(wait, pause_s=0.01)


class Fleet:
    """Nodes without Triton, the membership that names them, and what a process `a` knows of them."""

    def __init__(self) -> None:
        self.fakes: dict[str, FakeNode] = {}
        self.lines: list[str] = []
        self.now = Members()
        # Calls that a node has begun to answer.
        self.entered = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.clients = NodeClients()
        self.poll: NodePoll[frozenset[str]] | None = None

    def add(self, name: str, *models: str) -> FakeNode:
        self.fakes[name] = FakeNode(set(models), self.echo)
        self.state(*self.fakes)
        return self.fakes[name]

    def state(self, *names: str, problem: str = "") -> None:
        """The nodes that the membership names."""
        self.now = Members([self.node(name, self.fakes[name].address) for name in names], problem)

    def start(self) -> NodePoll[frozenset[str]]:
        self.poll = NodePoll(self, self.clients, "a", self.lines.append, loaded_models, period_s=0.02)
        return self.poll

    def members(self) -> Members:
        return self.now

    def close(self) -> None:
        """As a membership: nothing is held."""

    def stop(self) -> None:
        self.may_answer.set()
        if self.poll is not None:
            self.poll.close()
        self.clients.close()
        for fake in self.fakes.values():
            fake.close()

    def duplicate(self, *names: str) -> None:
        """Name the first node's name twice."""
        self.now = Members([self.node(names[0], self.fakes[name].address) for name in names])

    def echo(self, model: str, inputs: Tensors) -> Tensors:
        self.entered += 1
        assert self.may_answer.wait(120)
        return {"OUT": inputs["IN"]}

    @staticmethod
    def node(name: str, address: str) -> Node:
        return Node(name, Endpoint(address), f"http://{address}/metrics")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.stop()


def test_the_models_of_the_other_nodes_are_known_and_followed(fleet: Fleet) -> None:
    fleet.add("a", "own")
    other = fleet.add("b", "encode", "encode_w00")
    poll = fleet.start()
    wait_for(lambda: poll.answers == {"b": {"encode", "encode_w00"}})
    other.models.remove("encode_w00")
    wait_for(lambda: poll.answers == {"b": {"encode"}})
    fleet.add("c", "encode")
    wait_for(lambda: poll.answers == {"b": {"encode"}, "c": {"encode"}})
    fleet.state("a", "c")
    wait_for(lambda: poll.answers == {"c": {"encode"}})
    assert fleet.lines == []


def test_a_node_that_does_not_answer_delays_no_other_and_keeps_its_list(fleet: Fleet) -> None:
    slow, other = fleet.add("slow", "m"), fleet.add("b", "m")
    poll = fleet.start()
    wait_for(lambda: poll.answers == {"slow": {"m"}, "b": {"m"}})
    slow.open.clear()
    wait_for(lambda: slow.asked < other.asked)
    asked = slow.asked
    other.models.add("n")
    wait_for(lambda: poll.answers == {"slow": {"m"}, "b": {"m", "n"}})
    assert slow.asked <= asked + 1
    slow.open.set()
    slow.models.add("late")
    wait_for(lambda: "late" in poll.answers["slow"])


def test_a_node_that_has_gone_is_named_once_and_again_when_it_is_back(fleet: Fleet) -> None:
    gone = fleet.add("b", "m")
    poll = fleet.start()
    wait_for(lambda: poll.answers == {"b": {"m"}})
    gone.close()
    wait_for(lambda: bool(fleet.lines))
    time.sleep(0.2)
    assert len(fleet.lines) == 1 and fleet.lines[0].startswith("fleet: node b: ")
    fleet.fakes["b"] = FakeNode({"n"}, fleet.echo, gone.port)
    wait_for(lambda: poll.answers == {"b": {"n"}})
    wait_for(lambda: fleet.lines[1:] == ["fleet: node b: in order again"])


def test_of_two_nodes_with_one_name_neither_is_used_and_the_rest_is(fleet: Fleet) -> None:
    for name in "bcd":
        fleet.add(name, f"of_{name}")
    poll = fleet.start()
    wait_for(lambda: len(poll.answers) == 3)
    fleet.duplicate("b", "c")
    fleet.now = Members([*fleet.now.nodes, fleet.node("d", fleet.fakes["d"].address)])
    wait_for(lambda: poll.answers == {"d": {"of_d"}})
    (line,) = fleet.lines
    addresses = f"{fleet.fakes['b'].address}, {fleet.fakes['c'].address}"
    assert line == f"fleet: the name b: nodes at {addresses} have it; none of them is used"
    fleet.state("b", "d")
    wait_for(lambda: poll.answers == {"b": {"of_b"}, "d": {"of_d"}})
    assert fleet.lines[1:] == ["fleet: the name b: in order again"]


def test_a_problem_of_the_membership_is_logged(fleet: Fleet) -> None:
    fleet.add("b", "m")
    poll = fleet.start()
    fleet.state("b", problem="fleet.toml: no nodes")
    wait_for(lambda: fleet.lines == ["fleet: membership: fleet.toml: no nodes"])
    assert poll.answers.keys() == {"b"}


def test_the_connection_to_a_node_that_leaves_is_closed_after_its_calls(fleet: Fleet) -> None:
    fleet.add("b", "m")
    fleet.clients.follow(fleet.now.nodes)
    fleet.may_answer.clear()
    ended: list[object] = []

    async def ask() -> None:
        try:
            with fleet.clients.calling("b") as client:
                answer = await client.infer(ModelCall("m", {"IN": np.ones(1, np.float32)}, 20.0))
                ended.append(answer["OUT"].tolist())
        except ShapeshiftError as error:
            ended.append(error)

    calls: Sequence[object] = [fleet.clients.start(ask()) for _ in range(3)]
    wait_for(lambda: fleet.entered == len(calls))
    fleet.clients.follow([])
    fleet.clients.start(ask()).result(20)
    assert isinstance(ended.pop(), ModelGoneError)
    fleet.may_answer.set()
    wait_for(lambda: ended == [[1.0]] * 3)
