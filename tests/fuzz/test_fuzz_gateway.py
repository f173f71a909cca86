"""Bodies with faults to every route of the gateway, over a Triton in this process.

`make test` sends some, `make test-long` 100,000; SHAPESHIFT_FUZZ=N sends N.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence

import aiohttp
import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.gateway_bodies import VALID, bodies
from tests.gateway.fake_triton import FRONTS, TEMPLATE, FakeTriton

COUNT = int(os.environ.get("SHAPESHIFT_FUZZ", "100000"))
SEED = 18
AT_ONCE = 50
# Of the table in docs/gateway.md; 501 is that of the routes that change adapters.
ALLOWED = {200, 400, 404, 413, 429, 501}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    """With a model that thinks and calls tools."""
    marks = "{# <tool_call></think> #}{{ reasoning_effort }}{% if enable_thinking %}<think>{% endif %}"
    agent = {**FRONTS["generate"], "stream": "agent", "chat_template": TEMPLATE + marks}
    return FakeTriton({**FRONTS, "agent": agent})


@pytest.mark.parametrize("count", [300, pytest.param(COUNT, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_no_body_makes_the_gateway_fail(url: str, triton: FakeTriton, count: int) -> None:
    loop = asyncio.new_event_loop()
    session = loop.run_until_complete(_session())
    seen: Counter[int] = Counter()
    wrong: list[str] = []

    @seed(SEED)
    @settings(
        max_examples=-(-count // AT_ONCE),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(bodies(), min_size=AT_ONCE, max_size=AT_ONCE))
    def send(cases: list[tuple[str, bytes]]) -> None:
        triton.calls.clear()
        answers = loop.run_until_complete(_answers(session, url, cases))
        for (route, body), (status, said) in zip(cases, answers, strict=True):
            seen[status] += 1
            if (status not in ALLOWED or (status != 200 and not _is_coded(said))) and len(wrong) < 50:
                wrong.append(f"{status}: {route} {body[:500]!r}: {said[:300]!r}")

    send()
    loop.run_until_complete(session.close())
    loop.close()
    print(dict(seen))
    assert not wrong, "\n".join(wrong)
    assert sum(seen.values()) >= count and seen[200] > count / 50 < seen[400]
    for route, body in VALID.items():
        assert httpx2.post(f"{url}{route}", json=body, timeout=20).status_code in (200, 501), route


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))


async def _answers(
    session: aiohttp.ClientSession, url: str, cases: Sequence[tuple[str, bytes]]
) -> list[tuple[int, bytes]]:
    async def one(route: str, body: bytes) -> tuple[int, bytes]:
        async with session.post(f"{url}{route}", data=body) as answer:
            return answer.status, await answer.read()

    return await asyncio.gather(*(one(route, body) for route, body in cases))


def _is_coded(said: bytes) -> bool:
    error = json.loads(said).get("error", {})
    if "details" in error:
        # In Anthropic's shape.
        return bool(error["message"] and error["type"] and error["details"]["error_code"])
    return error.keys() == {"message", "type", "param", "code"} and bool(error["message"] and error["code"])
