"""What the bench of the gateway measures, against a small server with one slot."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest

from bench.common.systems import Outcome
from bench.common.text_bench import TextBench, TextScale
from bench.gateway import cancellation
from bench.gateway.infinity import _table
from bench.gateway.ways import HttpWay
from bench.peers import http_load
from shapeshift.errors import ShapeshiftError


class OneSlot:
    """Streams to one client at a time. A stream ends `frees_s` after its client has gone, or `at_once`."""

    def __init__(self, frees_s: float, at_once: bool = False) -> None:
        self._frees_s, self._at_once = frees_s, at_once
        self._slot = asyncio.Lock()
        self.bodies: list[dict[str, object]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        gone = asyncio.create_task(reader.read())
        async with self._slot:
            # In one write: whoever reads the piece reads the end, too, however busy the machine is.
            writer.write(b"data: {}\n\ndata: [DONE]\n\n" if self._at_once else b"data: {}\n\n")
            while not (self._at_once or gone.done()):
                await asyncio.sleep(0.005)
                writer.write(b"data: {}\n\n")
            await asyncio.sleep(self._frees_s)
        writer.close()


async def measured(slot: OneSlot, trials: int) -> list[float]:
    server = await asyncio.start_server(slot.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return list(await cancellation.times(HttpWay(f"127.0.0.1:{port}"), trials))


def test_the_time_until_a_slot_is_free_is_measured() -> None:
    slot = OneSlot(frees_s=0.2)
    assert min(asyncio.run(measured(slot, 3))) >= 0.2
    assert {body["model"] for body in slot.bodies} == {cancellation.MODEL}


def test_streams_that_end_by_themselves_measure_nothing() -> None:
    with pytest.raises(ShapeshiftError, match="only 0 of 1 trials"):
        asyncio.run(measured(OneSlot(0.0, at_once=True), 1))


def test_a_server_of_several_models_is_told_which() -> None:
    (named,), (bare,) = (http_load._bodies(["a"], "float", model) for model in ("encode", ""))
    assert json.loads(named) == {"model": "encode", **json.loads(bare)} and "model" not in json.loads(bare)


def test_the_table_beside_infinity_has_rates_and_processor_times() -> None:
    bench = TextBench(TextScale(1, 4, 0.0, (8, 32), (), ()), seed=0)
    for clients in (8, 32):
        for name, rate, spent_ms in (("ours", 50.0, 8.0), ("torch", 40.0, 10.0), ("slow", 5.0, 90.0)):
            bench.outcomes["short", f"closed {clients}", name] = [Outcome(np.full(4, 1.0), rate)]
            bench.own_ms["short", f"closed {clients}", name] = [spent_ms * 9, spent_ms, spent_ms]
    lines = _table(bench, ["ours"], ["torch", "slow"]).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("over the best", "of the best"))] == ["1.25"] * 4
    assert lines[4].split()[-3:] == ["8.0", "10.0", "90.0"]


def test_a_cell_keeps_the_processor_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = TextBench(TextScale(1, 4, 0.0, (8,), (), ()), seed=0)

    def burn() -> Outcome:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return Outcome(np.full(3, 1.0), 1.0, failed=1)

    start = time.process_time()
    bench._keep("short", "closed 8", "ours", burn)
    spent_ms = (time.process_time() - start) * 1e3
    # The kernel counts in ticks of 10 ms.
    assert bench.processor_ms("short", "closed 8", "ours") * 4 == pytest.approx(spent_ms, abs=40)
