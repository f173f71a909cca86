"""Which models each of the other nodes has loaded: a thread asks the nodes once a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shapeshift.fleet.membership.interface import Membership
from shapeshift.fleet.node_clients import NodeClients
from shapeshift.fleet.polling import PERIOD_S, NodePoll
from shapeshift.triton.async_client import AsyncClient

_ANSWER_S = 5.0


class Directory:
    """Keeps `clients` connected to the nodes of `membership` but `own`, and knows their models; see `polling.NodePoll`.

    A node that does not answer keeps its last list until it leaves the fleet: calls to it show what is wrong.
    """

    def __init__(
        self,
        membership: Membership,
        clients: NodeClients,
        own: str,
        log: Callable[[str], None],
        period_s: float = PERIOD_S,
    ) -> None:
        self._clients = clients
        self._poll: NodePoll[frozenset[str]] = NodePoll(membership, clients, own, log, _models, period_s)

    def models(self) -> Mapping[str, frozenset[str]]:
        """By node of the fleet, the models that were loaded when it last answered."""
        found = self._poll.answers
        return {node: found.get(node, frozenset()) for node in self._clients.nodes}

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread, and release the membership. The clients stay."""
        self._poll.close(timeout_s)


async def _models(node: str, client: AsyncClient) -> frozenset[str]:
    return frozenset(await client.models(_ANSWER_S))
