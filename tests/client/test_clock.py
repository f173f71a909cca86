from __future__ import annotations

import asyncio
import time

import pytest

from client import clock
from client.clock import Alarm


async def wake_at(instants: list[float]) -> list[float]:
    woken = []
    with Alarm() as alarm:
        for instant in instants:
            await alarm.wait_until(instant)
            woken.append(time.monotonic())
    return woken


@pytest.mark.parametrize("platform", ["linux", "other"])
def test_it_never_wakes_early(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform == "other":
        monkeypatch.setattr(clock.sys, "platform", "other")
    start = time.monotonic() + 0.01
    instants = [start + 0.0037 * k for k in range(20)]
    woken = asyncio.run(wake_at(instants))
    # The loop's own timer may fire within the resolution of its clock.
    assert all(late >= -1e-4 for late in (w - i for w, i in zip(woken, instants, strict=True)))


def test_an_instant_in_the_past_lets_other_tasks_run() -> None:
    async def count() -> int:
        passes = 0

        async def other() -> None:
            nonlocal passes
            while True:
                passes += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await wake_at([0.0] * 10)
        task.cancel()
        return passes

    assert asyncio.run(count()) >= 10


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wake_at([time.monotonic() + 60]), 0.02)
        assert await wake_at([time.monotonic() + 0.01])

    asyncio.run(cancelled())
