"""One question to each of the other nodes, asked once a second on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.node import Membership, Node, doubled
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.loops import Loop
from shapeshift.triton.async_client import AsyncClient

PERIOD_S = 1.0

T = TypeVar("T")


class NodePoll(Generic[T]):
    """Keeps `clients` connected to the nodes of `membership` but `node_name`, and holds what each answered last.

    A node that does not answer keeps its last answer until it leaves the fleet. What changes is logged with the name of
    the node. ask(node, client): the question to a node, on the event loop of `clients`; raises ShapeshiftError where
    there is no answer. period_s: between two questions to a node.
    """

    def __init__(
        self,
        membership: Membership,
        clients: NodeClients,
        node_name: str,
        log: Callable[[str], None],
        ask: Callable[[str, AsyncClient], Awaitable[T]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._membership = membership
        self._clients = clients
        self._node_name = node_name
        self._log = log
        self._ask_node = ask
        self._period_s = period_s
        self._answers: dict[str, tuple[T, float]] = {}
        self._questions: dict[str, Future[None]] = {}
        self._problems: dict[str, str] = {}
        self._loop = Loop("fleet-directory", self._step, log)
        self._loop.start()

    @property
    def answers(self) -> Mapping[str, T]:
        """By node of the fleet that has answered, its last answer."""
        answers = dict(self._answers)
        return {node: answers[node][0] for node in self._clients.nodes if node in answers}

    def silent_s(self, node: str) -> float:
        """Seconds since the node's last answer; infinite without one."""
        answer = self._answers.get(node)
        return float("inf") if answer is None else time.monotonic() - answer[1]

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread, and release the membership. The clients stay."""
        self._loop.stop(timeout_s)
        self._membership.close()

    def _step(self) -> float:
        members = self._membership.members()
        self._note("membership", members.problem)
        self._ask(self._others(members.nodes))
        return self._period_s

    def _ask(self, nodes: Sequence[Node]) -> None:
        self._clients.follow(nodes)
        names = [node.name for node in nodes]
        for node in [node for node in self._questions if node not in names]:
            del self._questions[node]
            self._answers.pop(node, None)
            self._problems.pop(f"node {node}", None)
        for node in names:
            # A slow node is not asked again before it answers, and delays no other.
            if node not in self._questions or self._questions[node].done():
                self._questions[node] = self._clients.start(self._read(node))

    async def _read(self, node: str) -> None:
        problem = ""
        try:
            with self._clients.calling(node) as client:
                self._answers[node] = await self._ask_node(node, client), time.monotonic()
        except ShapeshiftError as error:
            problem = str(error)
        self._note(f"node {node}", problem)

    def _others(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes but one's own. Two nodes of one name cannot be told apart: neither is used."""
        problems = doubled(nodes)
        for name in {node.name for node in nodes}:
            self._note(f"the name {name}", problems.get(name, ""))
        return [node for node in nodes if node.name != self._node_name and node.name not in problems]

    def _note(self, about: str, problem: str) -> None:
        """Log a problem when it begins and when it ends."""
        before = self._problems.get(about, "")
        self._problems[about] = problem
        if problem and not before:
            self._log(f"fleet: {about}: {problem}")
        elif before and not problem:
            self._log(f"fleet: {about}: in order again")
