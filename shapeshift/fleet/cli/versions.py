"""What each front of each node serves, as the fronts say: versions of Shapeshift, of engines, and of registries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shapeshift.errors import EngineError, ShapeshiftError
from shapeshift.fleet.node import Node
from shapeshift.serving.description import PLACEHOLDERS, told
from shapeshift.serving.model_args import DESCRIPTION
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.triton.names import worker_front

_ANSWER_S = 3.0
_UNTOLD = "untold"


@dataclass(frozen=True)
class FrontVersions:
    """What one front says; empty: it has none.

    software  version of Shapeshift in its process; `untold` of one that does not say
    engines   beginning of the hash of its engines' manifest, or of its checkpoint if it has no engines
    registry  version of its adapters, tasks or candidates
    """

    software: str = ""
    engines: str = ""
    registry: str = ""


Versions = Mapping[str, Mapping[str, FrontVersions]]
"""By node and front. A node or front that did not answer in 3 s is left out."""


def _client(node: Node) -> AsyncClient:
    return AsyncClient(node.grpc.address, node.grpc.tls)


def read(
    nodes: Iterable[Node], connect: Callable[[Node], AsyncClient] = _client
) -> dict[str, dict[str, FrontVersions]]:
    """The versions of all nodes; see `Versions`. A node that does not answer has no fronts."""

    async def read_all() -> dict[str, dict[str, FrontVersions]]:
        listed = list(nodes)
        fronts = await asyncio.gather(*(_of_node(connect(node)) for node in listed))
        return {node.name: of_node for node, of_node in zip(listed, fronts, strict=True)}

    return asyncio.run(read_all())


def software(fronts: Mapping[str, FrontVersions]) -> str:
    """The version of Shapeshift of a node with these fronts; several where its models were loaded by several."""
    return ", ".join(sorted({one.software for one in fronts.values()}))


def differing(versions: Versions) -> list[str]:
    """A line for each version that is not the same on all nodes."""
    nodes = {node: version for node in sorted(versions) if (version := software(versions[node]))}
    lines = [f"Shapeshift differs by node: {_by_node(nodes)}"] if len(set(nodes.values())) > 1 else []
    for front in sorted({front for fronts in versions.values() for front in fronts}):
        having = {node: versions[node][front] for node in sorted(versions) if front in versions[node]}
        for kind, of_kind in (
            ("engines differ", {node: one.engines for node, one in having.items()}),
            ("registry differs", {node: one.registry for node, one in having.items()}),
        ):
            told_by = {node: version for node, version in of_kind.items() if version}
            if len(set(told_by.values())) > 1:
                lines.append(f"{front}: its {kind} by node: {_by_node(told_by)}")
    return lines


def _by_node(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{node} has {version}" for node, version in versions.items())


async def _of_node(client: AsyncClient) -> dict[str, FrontVersions]:
    try:
        fronts = [name for name in await client.models(_ANSWER_S) if worker_front(name) is None]
        versions = await asyncio.gather(*(_of_front(client, name) for name in fronts))
    except ShapeshiftError:
        return {}
    finally:
        await client.close()
    return {name: one for name, one in zip(fronts, versions, strict=True) if one is not None}


async def _of_front(client: AsyncClient, name: str) -> FrontVersions | None:
    """What the front says; None for a model that says nothing of itself, or not in time."""
    for inputs in PLACEHOLDERS:
        try:
            answer = await client.first(ModelCall(name, inputs, _ANSWER_S, (DESCRIPTION.name,)))
            return _told(told(answer))
        except EngineError:
            # It wants other inputs.
            continue
        except (ShapeshiftError, ValueError, KeyError, IndexError, AttributeError):
            return None
    return None


def _told(facts: Mapping[str, Any]) -> FrontVersions:
    engines = facts.get("engines") or facts.get("checkpoint_version") or ""
    return FrontVersions(str(facts.get("shapeshift") or _UNTOLD), str(engines), str(facts.get("registry") or ""))
