"""What is served: the fronts of all servers as they describe themselves, and the names by which requests find them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import EngineError, ModelError, ModelGoneError, ShapeshiftError, did_you_mean
from shapeshift.gateway.errors import ApiError
from shapeshift.gateway.upstream import Server, Upstream
from shapeshift.serving.description import PLACEHOLDERS, told
from shapeshift.serving.model_args import DESCRIPTION
from shapeshift.triton.async_client import ModelCall
from shapeshift.triton.names import worker_front

# Between a model's name and its adapter's.
_SEPARATOR = ":"
_CALL_TIMEOUT_S = 5.0
# A request for an unknown name has the servers asked again, at most this often.
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class Front:
    """A model that clients may name. description: what it says of itself, the object of its output DESCRIPTION."""

    name: str
    kind: str
    description: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """All that it serves as."""
        return [self.kind, *self.names("also")]

    def serves_as(self, kinds: Collection[str]) -> bool:
        """Whether it is of one of these kinds."""
        return any(kind in kinds for kind in self.kinds)

    @property
    def stream(self) -> str:
        """The model that sends an answer piece by piece."""
        return str(self.description.get("stream") or self.name)

    def names(self, of: str) -> list[str]:
        """Names that it states, `of` its adapters, labels or outputs; none where it has none."""
        return [str(name) for name in self.description.get(of) or []]

    def number(self, name: str, default: int) -> int:
        """A limit that it states, such as `max_batch_size`."""
        number = self.description.get(name)
        return default if number is None else int(number)


@dataclass(frozen=True)
class Target:
    """What a request's `model` means. adapter: empty for the model itself; name: as the request wrote it."""

    front: Front
    adapter: str
    name: str

    @property
    def parameters(self) -> Mapping[str, str]:
        """The request parameters that it stands for."""
        return {"lora_name": self.adapter} if self.adapter else {}


class Catalogue:
    """Asks every front of every server to describe itself, and finds fronts by name.

    reloads_s: for so long after it was seen last, a model may be one that is loaded again.
    """

    def __init__(self, upstream: Upstream, reloads_s: float = 30.0) -> None:
        self._upstream = upstream
        self._reloads_s = reloads_s
        # All that requests may name and /v1/models lists.
        self.targets: dict[str, Target] = {}
        self._fronts: dict[str, Front] = {}
        # By name: when a front was seen last, by time.monotonic.
        self._seen: dict[str, float] = {}
        self._of_server: dict[Server, dict[str, Front]] = {}
        # With which of `PLACEHOLDERS` each model has described itself.
        self._placeholders: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._looked_at = 0.0
        self._looking = asyncio.Lock()
        self.since = int(time.time())

    @property
    def fronts(self) -> list[Front]:
        """The fronts, by name; of two models of one generator only the one that streams."""
        return [front for _, front in sorted(self._fronts.items()) if front.stream in (front.name, "")]

    async def refresh(self, since: float = math.inf) -> None:
        """Look at all servers once, unless that was done after the time `since` (of time.monotonic).

        A server that does not answer keeps its fronts: their requests get status 503.
        """
        async with self._looking:
            if self._looked_at > since:
                return
            await asyncio.gather(*(self._look_at(server) for server in self._upstream.servers))
            self._looked_at = time.monotonic()
            # Of a front that several servers have, the first one's.
            served = reversed(self._of_server.values())
            self._fronts = {name: front for fronts in served for name, front in fronts.items()}
            self._seen |= dict.fromkeys(self._fronts, self._looked_at)
            self.targets = {target.name: target for target in self._targets()}

    async def find(self, name: str, kinds: Collection[str]) -> Target:
        """The target called `name`, of one of the `kinds`.

        Raises ApiError with status 404, or 400 for another kind, and ModelGoneError for a model that has left just now.
        """
        target = self._named(name)
        if target is None:
            # One look answers all requests that have waited for it.
            await self.refresh(time.monotonic() - _LOOK_AGAIN_S)
            target = self._named(name)
        if target is None and not self._of_server:
            raise ModelGoneError("no server has answered yet; retry later")
        seen_at = self._seen.get(name.partition(_SEPARATOR)[0], -math.inf)
        if target is None and self._looked_at - self._reloads_s < seen_at < self._looked_at:
            raise ModelGoneError(f"model: {name[:80]!r} is not loaded at present; retry later")
        if target is None:
            raise self._unknown(name, kinds)
        if not target.front.serves_as(kinds):
            listed = ", ".join(self._of(kinds)) or "none is served"
            text = f"model: {name} is for {' and '.join(target.front.kinds)}; models for this request: {listed}"
            raise ApiError(400, text, param="model", code="model_not_supported")
        return target

    async def only(self, name: str | None, kinds: Collection[str]) -> Target:
        """As `find`; without a name the only front of these kinds, or the only one that is of them before all.

        Raises ApiError where there are several, or none.
        """
        if name is not None:
            return await self.find(name, kinds)
        first = [front.name for front in self.fronts if front.kind in kinds]
        names = first if len(first) == 1 else self._of(kinds)
        if len(names) != 1:
            text = f"model: name one of {', '.join(names)}" if names else f"no model for {' or '.join(kinds)} is served"
            raise ApiError(400 if names else 404, text, param="model", code="model_not_found")
        return self.targets[names[0]]

    def _targets(self) -> Iterator[Target]:
        """The fronts and their adapters. An adapter has a bare name, too, where that is unique."""
        bare = Counter(adapter for front in self.fronts for adapter in front.names("adapters"))
        yield from (Target(front, "", front.name) for front in self.fronts)
        for front in self.fronts:
            for adapter in front.names("adapters"):
                yield Target(front, adapter, f"{front.name}{_SEPARATOR}{adapter}")
                if bare[adapter] == 1 and adapter not in self._fronts:
                    yield Target(front, adapter, adapter)

    def _named(self, name: str) -> Target | None:
        target, front = self.targets.get(name), self._fronts.get(name)
        # Of two models of one generator, the one that is not listed.
        return target if target or not front else Target(self._fronts.get(front.stream, front), "", name)

    def _of(self, kinds: Collection[str]) -> list[str]:
        return [front.name for front in self.fronts if front.serves_as(kinds)]

    def _unknown(self, name: str, kinds: Collection[str]) -> ApiError:
        served = [target.name for target in self.targets.values() if target.front.serves_as(kinds)]
        near = did_you_mean(name, served) or (f"; there are {', '.join(served[:20])}" if served else "")
        shown = name if len(name) <= 80 else f"{name[:79]}…"
        return ApiError(404, f"model: {shown!r} is not served{near}", param="model", code="model_not_found")

    async def _look_at(self, server: Server) -> None:
        try:
            names = await server.client.models(_CALL_TIMEOUT_S)
        except ShapeshiftError:
            server.models = frozenset()
            return
        fronts = [name for name in names if worker_front(name) is None]
        described = await asyncio.gather(*(self._described(server, name) for name in fronts))
        self._of_server[server] = {front.name: front for front in described if front is not None}
        server.models = frozenset(self._of_server[server])

    async def _described(self, server: Server, name: str) -> Front | None:
        """What the model says of itself; None for one that says nothing, or is gone."""
        try:
            for inputs in self._placeholders.get(name, PLACEHOLDERS):
                with contextlib.suppress(EngineError):
                    front = await self._front(server, name, inputs)
                    self._placeholders[name] = (inputs,)
                    return front
            self._placeholders.pop(name, None)
            return None
        except ModelError:
            return None
        except (ShapeshiftError, ValueError, KeyError, IndexError, TypeError):
            # It may be busy: what it said before is still so, and its requests fail by themselves where it is gone.
            return self._of_server.get(server, {}).get(name)

    async def _front(self, server: Server, name: str, inputs: Mapping[str, Any]) -> Front:
        # A decoupled model answers streams only, and a stream reaches the others as well.
        answer = await server.client.first(ModelCall(name, inputs, _CALL_TIMEOUT_S, (DESCRIPTION.name,)))
        description = told(answer)
        return Front(name, str(description["kind"]), description)
