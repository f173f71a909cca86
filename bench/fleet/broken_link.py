"""A front, its own worker and one behind a TCP proxy that misbehaves: every answer is checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.output import Output
from bench.fleet.nodes import Nodes, build_fronts, running_nodes
from bench.fleet.packet_loss import netem_problem, packet_loss
from bench.fleet.tcp_proxy import TcpProxy
from shapeshift.errors import ShapeshiftError, TimedOutError
from shapeshift.triton.async_client import AsyncClient, ModelCall

_FRONT = "encode"
_PER_S = 40.0
_LIMIT_S = 30.0
_LOSS = 0.02
_TEXTS = [np.full((1, 1 + number * 37 % 200), 101 + number * 977 % 20000, np.int64) for number in range(64)]


@dataclass(frozen=True)
class Outcome:
    """Requests of one state of the link. stuck: not answered within 30 s; there: texts that the other node computed."""

    link: str
    requests: int
    failed: int
    wrong: int
    stuck: int
    p50_ms: float
    p98_ms: float
    there: int


def measure(output: Output, quick: bool) -> None:
    """A whole link, and one that delays, loses packets, is cut, and is reset again and again, each for some seconds
    under load: in plain text, and with mutual TLS."""
    build_fronts([_FRONT], time_scale="0.6", bins="64,128,256,512", max_queue_ms="0")
    output.say(f"\n{_PER_S:g} texts/s, one worker on the front's node, one behind a TCP proxy; emulated engines")
    problem = netem_problem()
    if problem:
        output.say(f"  loss of packets is not measured: {problem}")
    for secured in (False, True):
        _measure(output, 14.0 if quick else 60.0, secured, loses=not problem)


def _measure(output: Output, seconds: float, secured: bool, loses: bool) -> None:
    models = dict.fromkeys(("a", "b"), (_FRONT, f"{_FRONT}_w00"))
    with running_nodes(models, secured) as nodes, TcpProxy(nodes.servers["b"].grpc_url) as proxy:
        nodes.state({"a": nodes.servers["a"].grpc_url, "b": proxy.address})
        nodes.wait_joined("a", _FRONT, 2)

        def cut() -> None:
            proxy.cut = True
            time.sleep(10.0)
            proxy.cut = False

        def delay() -> None:
            proxy.delay_s = 0.1
            time.sleep(seconds)
            proxy.delay_s = 0.0

        def reset() -> None:
            for _ in range(int(seconds)):
                proxy.reset()
                time.sleep(1.0)

        def lose() -> None:
            with packet_loss(int(proxy.address.rpartition(":")[2]), _LOSS):
                time.sleep(seconds)

        states: dict[str, Callable[[], None]] = {"whole": lambda: None}
        states |= {"100 ms more each way": delay, "cut for 10 s": cut, "reset each second": reset}
        if loses:
            states[f"{_LOSS:.0%} of the packets lost"] = lose
        outcomes = []
        for link, disturb in states.items():
            computed = nodes.total("b", "shapeshift_engine_rows_total")
            found = asyncio.run(_load(nodes, seconds, disturb))
            there = int(nodes.total("b", "shapeshift_engine_rows_total") - computed)
            outcomes.append(_outcome(link, found, there))
            nodes.wait_joined("a", _FRONT, 2)
    name = "mutual TLS" if secured else "plain text"
    output.say(f"  {name:24}{'requests':>9}{'failed':>7}{'wrong':>6}{'stuck':>6}{'p50 ms':>9}{'p98 ms':>9}{'there':>7}")
    for one in outcomes:
        output.say(
            f"  {one.link:24}{one.requests:9}{one.failed:7}{one.wrong:6}{one.stuck:6}"
            f"{one.p50_ms:9.1f}{one.p98_ms:9.1f}{one.there:7}"
        )
    output.data.setdefault("broken_link", {})[name] = [asdict(one) for one in outcomes]


_Result = tuple[float, str]


async def _load(nodes: Nodes, seconds: float, disturb: Callable[[], None]) -> list[_Result]:
    """Seconds from the intended instant and the end of each request of an open loop: right, wrong, failed or stuck."""
    client = AsyncClient(nodes.servers["a"].grpc_url, nodes.tls)
    wanted = [await _ask(client, ids) for ids in _TEXTS]
    begin = time.monotonic()
    disturbing = asyncio.ensure_future(asyncio.to_thread(disturb))
    tasks = []
    for number in range(int(seconds * _PER_S)):
        due = begin + number / _PER_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        text = number % len(_TEXTS)
        tasks.append(asyncio.ensure_future(_checked(client, _TEXTS[text], wanted[text], due)))
    found = await asyncio.gather(*tasks)
    await disturbing
    await client.close()
    return list(found)


async def _checked(client: AsyncClient, ids: NDArray[Any], wanted: NDArray[Any], due: float) -> _Result:
    try:
        end = "right" if np.array_equal(await _ask(client, ids), wanted) else "wrong"
    except TimedOutError:
        end = "stuck"
    except ShapeshiftError:
        end = "failed"
    return time.monotonic() - due, end


async def _ask(client: AsyncClient, ids: NDArray[Any]) -> NDArray[Any]:
    inputs = {"INPUT_IDS": ids, "ATTENTION_MASK": np.ones_like(ids)}
    return (await client.infer(ModelCall(_FRONT, inputs, _LIMIT_S, ("EMBEDDING",))))["EMBEDDING"]


def _outcome(link: str, found: list[_Result], there: int) -> Outcome:
    ends = [end for _, end in found]
    p50_ms, p98_ms = np.percentile([took_s for took_s, end in found if end == "right"], (50, 98)) * 1e3
    failed, wrong, stuck = (ends.count(end) for end in ("failed", "wrong", "stuck"))
    return Outcome(link, len(found), failed, wrong, stuck, float(p50_ms), float(p98_ms), there)
