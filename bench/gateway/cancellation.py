"""How soon the slot of a client that vanishes is free: from the close of its socket to the first piece of another's.

A copy of the generator has one slot. One stream holds it, a second request waits. When the first one's socket closes,
the second can begin: the time holds the gateway's notice, the cancellation in Triton, the front's next iteration and
the first token. The second stream holds the slot of the next trial.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common.output import BUILD
from bench.gateway.ways import Connection, HttpWay
from shapeshift.errors import ShapeshiftError
from shapeshift.triton import model_config

MODEL = "generate_slot"
_LIKE = "generate"
# As many as a prompt leaves room for: a stream must outlast a trial.
_LONG = 480
_WAITS_S, _GIVE_UP_S = 0.03, 60.0


def publish(repository: Path) -> None:
    """Write the copy with one slot to `repository`."""
    like = BUILD / "repository" / _LIKE
    config = model_config.read(like / "config.pbtxt")
    config.name = MODEL
    model_config.set_parameter(config, "max_concurrency", "1")
    for name, value in model_config.parameters(config).items():
        if name in ("checkpoint", "kernel_cache"):
            model_config.set_parameter(config, name, str((like / value).resolve()))
    (repository / MODEL / "1").mkdir(parents=True)
    model_config.write(config, repository / MODEL / "config.pbtxt")


async def times(way: HttpWay, trials: int) -> NDArray[np.float64]:
    """Seconds of each trial. A trial in which a stream came to its own end is done again. Raises ShapeshiftError."""
    holder = await _asked(way)
    found: list[float] = []
    for _ in range(20 * trials):
        await holder.first()
        waiting = await _asked(way)
        await asyncio.sleep(_WAITS_S)
        valid = not waiting.begun and not holder.ended
        start = time.perf_counter()
        holder.vanish()
        await waiting.first()
        if valid:
            found.append(time.perf_counter() - start)
        holder = waiting
        if len(found) == trials:
            holder.vanish()
            return np.array(found)
    raise ShapeshiftError(f"only {len(found)} of {trials} trials: streams came to their end before")


async def _asked(way: HttpWay) -> _Stream:
    return _Stream(await way.ask(MODEL, _LONG))


class _Stream:
    """A stream that is read as fast as it comes."""

    def __init__(self, connection: Connection) -> None:
        self._reader, self._writer = connection
        self.ended = False
        self._begun = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def begun(self) -> bool:
        """Whether a piece has come."""
        return self._begun.is_set()

    async def first(self) -> None:
        """Return once a piece has come."""
        await asyncio.wait_for(self._begun.wait(), _GIVE_UP_S)

    def vanish(self) -> None:
        """Close the socket, as the death of the client's process would."""
        self._reading.cancel()
        self._writer.transport.abort()

    async def _read(self) -> None:
        async for line in self._reader:
            if line.startswith(b"data: {"):
                self._begun.set()
            elif line.startswith(b"data: [DONE]"):
                break
        self.ended = True
