"""The connections of a process to the other nodes of its fleet: one to each, all on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from shapeshift.errors import ModelGoneError
from shapeshift.fleet.node import Node
from shapeshift.triton.async_client import AsyncClient, ClientThread


@dataclass(eq=False)
class _Link:
    """calls: in flight; has_left: whether the last of them closes the connection."""

    node: Node
    client: AsyncClient
    calls: int = 0
    has_left: bool = False


class NodeClients:
    """A client for each node that `follow` names. All but `calling` may be used on any thread."""

    def __init__(self) -> None:
        # By name of the node.
        self._links: dict[str, _Link] = {}
        self._thread = ClientThread(self._close_all)

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes."""
        return list(self._links)

    def follow(self, nodes: Sequence[Node]) -> None:
        """Hold a connection to each of `nodes`, and to no other; returns when it is so.

        The connection to a node that has left, or has another address, is closed once its calls have ended.
        """
        self._thread.start(self._follow({node.name: node for node in nodes})).result()

    def start(self, task: Coroutine[Any, Any, None]) -> Future[None]:
        """Run `task` on the event loop. It calls nodes by `calling`."""
        return self._thread.start(task)

    @contextlib.contextmanager
    def calling(self, node: str) -> Iterator[AsyncClient]:
        """The client of a node, for one call on the event loop. Raises ModelGoneError for a node that has left."""
        link = self._links.get(node)
        if link is None:
            raise ModelGoneError(f"node {node} is not in the fleet")
        link.calls += 1
        try:
            yield link.client
        finally:
            link.calls -= 1
            if link.has_left and not link.calls:
                asyncio.ensure_future(link.client.close())

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all tasks and close the connections."""
        self._thread.close(timeout_s)

    async def _close_all(self) -> None:
        await asyncio.gather(*(link.client.close() for link in self._links.values()))

    async def _follow(self, nodes: Mapping[str, Node]) -> None:
        for name, link in list(self._links.items()):
            if name not in nodes or nodes[name].grpc != link.node.grpc:
                del self._links[name]
                link.has_left = True
                if not link.calls:
                    await link.client.close()
        for name, node in nodes.items():
            if name not in self._links:
                self._links[name] = _Link(node, AsyncClient(node.grpc.address, node.grpc.tls))
