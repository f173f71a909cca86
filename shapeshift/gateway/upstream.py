"""The Tritons that are asked: which one takes a call, and what happens when it does not answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from shapeshift.errors import ModelDiedError, ModelGoneError, ShapeshiftError
from shapeshift.triton.async_client import AsyncClient, ModelCall, Tensors

# A server that did not answer is asked last for this long.
_DISTRUST_S = 2.0
TRACE: ContextVar[str] = ContextVar("TRACE", default="")
"""The header of the span of the request that is served; empty where it is not traced."""


@dataclass(eq=False)
class Server:
    """One Triton. models: those that it answered for at the last look, see `catalogue`; empty before the first."""

    client: AsyncClient
    in_flight: int = 0
    distrusted_until: float = 0.0
    models: frozenset[str] = field(default_factory=frozenset)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call while it is in flight, and distrust a server that is gone."""
        self.in_flight += 1
        try:
            yield
        except (ModelGoneError, ModelDiedError):
            self.distrusted_until = time.monotonic() + _DISTRUST_S
            raise
        finally:
            self.in_flight -= 1


class Upstream:
    """Calls models on the server with the fewest calls in flight; a model that is gone is asked for on the next one."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self.servers = [Server(client) for client in clients]

    async def infer(self, call: ModelCall) -> Tensors:
        """The outputs of a model that answers once. Raises as `AsyncClient.infer` does, for the last server asked."""
        call = _traced(call)
        gone: ShapeshiftError = _unserved(call)
        for server in self._candidates(call.model):
            try:
                with server.counted():
                    return await server.client.infer(call)
            except (ModelGoneError, ModelDiedError) as error:
                gone = error
        raise gone

    async def stream(self, call: ModelCall) -> AsyncGenerator[Tensors, None]:
        """The responses of a decoupled model. Another server is asked only before the first response."""
        call = _traced(call)
        gone: ShapeshiftError = _unserved(call)
        for server in self._candidates(call.model):
            answered = False
            try:
                with server.counted():
                    async with contextlib.aclosing(server.client.stream(call)) as responses:
                        async for tensors in responses:
                            answered = True
                            yield tensors
                return
            except (ModelGoneError, ModelDiedError) as error:
                if answered:
                    raise
                gone = error
        raise gone

    async def close(self) -> None:
        """Close all connections."""
        for server in self.servers:
            await server.client.close()

    def _candidates(self, model: str) -> list[Server]:
        """The servers to ask for a model, the best one first."""
        now = time.monotonic()

        def order(server: Server) -> tuple[bool, bool, int]:
            return server.distrusted_until > now, model not in server.models, server.in_flight

        return sorted(self.servers, key=order)


def _traced(call: ModelCall) -> ModelCall:
    return replace(call, trace=trace) if (trace := TRACE.get()) else call


def _unserved(call: ModelCall) -> ModelGoneError:
    return ModelGoneError(f"no server takes requests for model {call.model}; retry later")
