"""Which version of its registry (adapters, tasks, candidates) each front of each node serves, as the fronts say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from shapeshift.errors import EngineError, ShapeshiftError
from shapeshift.fleet.node import Node
from shapeshift.serving.description import PLACEHOLDERS, told
from shapeshift.serving.model_args import DESCRIPTION
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.names import worker_front

_ANSWER_S = 3.0


def versions(nodes: Iterable[Node]) -> dict[str, dict[str, str]]:
    """By node, and by front that has a registry, its version; of a node or front that does not answer in 3 s, none."""
    return asyncio.run(_versions(list(nodes)))


def differing(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each front whose nodes serve different versions. found: see `versions`."""
    by_front: dict[str, dict[str, str]] = {}
    for node, own in sorted(found.items()):
        for front, version in own.items():
            by_front.setdefault(front, {})[node] = version
    return [
        f"{front}: its registry differs by node: {', '.join(f'{node} has {own[node]}' for node in own)}"
        for front, own in sorted(by_front.items())
        if len(set(own.values())) > 1
    ]


async def _versions(nodes: list[Node]) -> dict[str, dict[str, str]]:
    found = await asyncio.gather(*(_of_node(AsyncClient(node.grpc.address, node.grpc.tls)) for node in nodes))
    return {node.name: own for node, own in zip(nodes, found, strict=True)}


async def _of_node(client: AsyncClient) -> dict[str, str]:
    try:
        fronts = [name for name in await client.models(_ANSWER_S) if worker_front(name) is None]
        found = await asyncio.gather(*(_of_front(client, name) for name in fronts))
    except ShapeshiftError:
        return {}
    finally:
        await client.close()
    return {name: version for name, version in zip(fronts, found, strict=True) if version}


async def _of_front(client: AsyncClient, name: str) -> str:
    """The version; empty for a model that has no registry, or does not say."""
    for inputs in PLACEHOLDERS:
        try:
            found = await client.first(ModelCall(name, inputs, _ANSWER_S, (DESCRIPTION.name,)))
            return str(told(found).get("registry") or "")
        except EngineError:
            # It wants other inputs.
            continue
        except (ShapeshiftError, ValueError, KeyError, IndexError, AttributeError):
            return ""
    return ""
