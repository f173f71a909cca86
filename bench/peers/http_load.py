"""Closed and open loops of one-text requests against an OpenAI-like `POST <url>/embeddings`.

Bodies are made before the clock starts, and answers are read but not parsed: the generator usually shares the server's
cores and must use little of them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import aiohttp
import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import UnsupportedError
from shapeshift.settings import require

Encoding = Literal["base64", "float"]
HEADERS = {"Content-Type": "application/json"}
# uvicorn closes a connection after 5 idle seconds; a request sent at that moment is lost.
KEEPALIVE_S = 3.0
# A slow answer is a result, too.
_TIMEOUT_S = 600.0
_PAUSE_S = 0.05
_FAILURES = (UnsupportedError, aiohttp.ClientError, TimeoutError)


@dataclass(frozen=True)
class Load:
    """The result of a loop: one latency a request, and the time from the start to the last answer, in seconds.

    failed: requests with another answer than 200, none in time, or a lost connection; they have no latency.
    """

    latencies: NDArray[np.float64]
    elapsed: float
    failed: int = 0

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.elapsed


async def closed_loop(
    url: str,
    texts: Sequence[str],
    concurrency: int,
    *,
    duration_s: float | None = None,
    count: int | None = None,
    encoding: Encoding = "base64",
    timeout_s: float = _TIMEOUT_S,
    model: str = "",
) -> Load:
    """`concurrency` clients, each of which sends its next request when one is answered, for `duration_s` or `count`.

    Texts are sent in turn, over and over. No request starts after `duration_s`; requests in flight are awaited and
    counted, and `elapsed` ends with the last answer. Latencies are in the order of the answers. model: named in each
    request where it is not empty. A request that fails or takes longer than `timeout_s` is counted; its client pauses.
    """
    limits = (duration_s, count)
    require(limits.count(None) == 1, "duration_s, count", limits, "give exactly one of the two")
    require(concurrency >= 1, "concurrency", concurrency, "at least 1")
    bodies = itertools.islice(itertools.cycle(_bodies(texts, encoding, model)), count)
    latencies: list[float] = []
    failed = 0
    async with _session(timeout_s, concurrency) as session:
        start = perf_counter()
        deadline = start + (float("inf") if duration_s is None else duration_s)

        async def client() -> None:
            nonlocal failed
            while (sent := perf_counter()) < deadline and (body := next(bodies, None)) is not None:
                try:
                    await _post(session, url, body)
                    latencies.append(perf_counter() - sent)
                except _FAILURES:
                    failed += 1
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(client() for _ in range(concurrency)))
        elapsed = perf_counter() - start
    return Load(np.array(latencies), elapsed, failed)


async def open_loop(
    url: str,
    texts: Sequence[str],
    instants: Sequence[float] | NDArray[np.float64],
    *,
    encoding: Encoding = "base64",
    timeout_s: float = _TIMEOUT_S,
    model: str = "",
) -> Load:
    """One request at each of the ascending `instants` (seconds from now), however many are unanswered.

    `texts[i % len(texts)]` is sent at `instants[i]`, and its latency counts from that intended instant: it includes the
    generator's lateness and the wait for a connection. Failures are counted as in `closed_loop`.
    """
    bodies = _bodies(texts, encoding, model)
    latencies = np.full(len(instants), np.nan)
    async with _session(timeout_s, 0) as session:
        start = perf_counter()

        async def send(index: int, due: float) -> None:
            with contextlib.suppress(*_FAILURES):
                await _post(session, url, bodies[index % len(bodies)])
                latencies[index] = perf_counter() - due

        async with asyncio.TaskGroup() as group:
            for index, instant in enumerate(instants):
                due = start + float(instant)
                if (wait := due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(send(index, due))
        elapsed = perf_counter() - start
    good = ~np.isnan(latencies)
    return Load(latencies[good], elapsed, int((~good).sum()))


async def embeddings(url: str, texts: Sequence[str], timeout_s: float = _TIMEOUT_S) -> NDArray[np.float32]:
    """The vectors of `texts`, float32 [texts, width], by one request. Raises UnsupportedError for another answer."""
    body = json.dumps({"input": list(texts), "encoding_format": "base64"}).encode()
    async with _session(timeout_s, 1) as session:
        rows = json.loads(await _post(session, url, body))["data"]
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), np.float32) for row in rows])


def _bodies(texts: Sequence[str], encoding: Encoding, model: str) -> list[bytes]:
    require(len(texts) > 0, "texts", texts, "at least one")
    named = {"model": model} if model else {}
    return [json.dumps({**named, "input": [text], "encoding_format": encoding}).encode() for text in texts]


def _session(timeout_s: float, connections: int) -> aiohttp.ClientSession:
    """A session with so many keep-alive connections, 0 for no limit; proxy settings are ignored."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=HEADERS,
    )


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
    async with session.post(f"{url}/embeddings", data=body) as response:
        answer = await response.read()
        if response.status != 200:
            raise UnsupportedError(f"{url} answered {response.status}: {answer[:300]!r}")
        return answer
