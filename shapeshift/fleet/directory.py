"""Which models each of the other nodes has loaded: a thread asks the nodes once a second."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.membership.interface import Membership
from shapeshift.fleet.node import Node
from shapeshift.fleet.node_clients import NodeClients

_PERIOD_S = 1.0
_ANSWER_S = 5.0


class Directory:
    """Keeps `clients` connected to the nodes of `membership` but `own`, and knows their models.

    A node that does not answer keeps its last list until it leaves the fleet: calls to it show what is wrong. What
    changes is logged with the name of the node. period_s: between two questions to a node.
    """

    def __init__(
        self,
        membership: Membership,
        clients: NodeClients,
        own: str,
        log: Callable[[str], None],
        period_s: float = _PERIOD_S,
    ) -> None:
        self._membership = membership
        self._clients = clients
        self._own = own
        self._log = log
        self._period_s = period_s
        self._models: dict[str, frozenset[str]] = {}
        self._asked: dict[str, Future[None]] = {}
        self._problems: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-directory", daemon=True)
        self._thread.start()

    def models(self) -> Mapping[str, frozenset[str]]:
        """By node of the fleet, the models that were loaded when it last answered."""
        return {node: self._models.get(node, frozenset()) for node in self._clients.nodes}

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread, and release the membership. The clients stay."""
        self._stop.set()
        self._thread.join(timeout_s)
        self._membership.close()

    def _run(self) -> None:
        while True:
            members = self._membership.members()
            self._note("membership", members.problem)
            self._ask(self._others(members.nodes))
            if self._stop.wait(self._period_s):
                return

    def _ask(self, nodes: Sequence[Node]) -> None:
        self._clients.follow(nodes)
        names = [node.name for node in nodes]
        for node in [node for node in self._asked if node not in names]:
            del self._asked[node]
            self._models.pop(node, None)
            self._problems.pop(f"node {node}", None)
        for node in names:
            # A slow node is not asked again before it answers, and delays no other.
            if node not in self._asked or self._asked[node].done():
                self._asked[node] = self._clients.start(self._read(node))

    async def _read(self, node: str) -> None:
        problem = ""
        try:
            with self._clients.calling(node) as client:
                self._models[node] = frozenset(await client.models(_ANSWER_S))
        except ShapeshiftError as error:
            problem = str(error)
        self._note(f"node {node}", problem)

    def _others(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes but one's own. Two nodes of one name cannot be told apart: neither is used."""
        count = Counter(node.name for node in nodes)
        for name in count:
            addresses = ", ".join(node.grpc.address for node in nodes if node.name == name)
            problem = f"nodes at {addresses} have it; none of them is used" if count[name] > 1 else ""
            self._note(f"the name {name}", problem)
        return [node for node in nodes if node.name != self._own and count[node.name] == 1]

    def _note(self, about: str, problem: str) -> None:
        """Log a problem when it begins and when it ends."""
        before = self._problems.get(about, "")
        self._problems[about] = problem
        if problem and not before:
            self._log(f"fleet: {about}: {problem}")
        elif before and not problem:
            self._log(f"fleet: {about}: in order again")
