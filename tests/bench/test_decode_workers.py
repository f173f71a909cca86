"""The processes that generate for a benchmark: what passes between them, and their end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from bench.decode_loads import Load
from bench.decode_systems import Window, Worker
from bench.peers.decode_worker import Ask, send
from bench.peers.transformers_batches import Batches
from shapeshift.errors import UnsupportedError

ECHO = """
import os, sys, multiprocessing, time
from bench.peers.decode_worker import Replayed, serve
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
child.start()
def replay(asks, window_s=0.0):
    print("noise")
    if not asks[0].prompt:
        sys.exit("said before the end")
    stamps = [[ask.at_s + 0.5 * at for at in range(ask.new)] for ask in asks]
    return Replayed(stamps, [ask.prompt * ask.new for ask in asks], {"child": child.pid, "window_s": window_s})
serve(replay)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker("echo", [sys.executable, "-c", ECHO], tmp_path / "echo.log")


def test_asks_and_answers_pass(worker: Worker) -> None:
    worker.wait_ready()
    replayed = worker.replay(Load("x", [Ask(0.0, [3], 2), Ask(1.0, [4], 1)]))
    assert replayed.stamps == [[0.0, 0.5], [1.0]] and replayed.tokens == [[3, 3], [4]]
    assert replayed.extra["window_s"] == 0.0
    assert Window("", worker, 1.5).replay(Load("x", [Ask(0.0, [3], 1)])).extra["window_s"] == 1.5
    child = int(replayed.extra["child"])
    os.kill(child, 0)
    worker.stop()
    end = time.monotonic() + 10
    while time.monotonic() < end and Path(f"/proc/{child}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_a_worker_that_ends_is_named_with_its_log(worker: Worker) -> None:
    worker.wait_ready()
    with pytest.raises(UnsupportedError, match=r"echo ended with 1(?s:.*)said before the end"):
        worker.replay(Load("x", [Ask(0.0, [], 1)]))
    worker.stop()


def test_requests_are_sent_in_the_order_of_their_instants() -> None:
    sent: list[tuple[int, float]] = []
    start = send([Ask(0.05, [], 1), Ask(0.0, [], 1)], lambda number, ask: sent.append((number, time.perf_counter())))
    while len(sent) < 2:
        time.sleep(0.01)
    assert [number for number, _ in sent] == [1, 0]
    assert sent[0][1] >= start and sent[1][1] >= start + 0.05


def test_a_batch_leaves_when_its_window_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def generate(model: object, asks: list[Ask]) -> tuple[list[list[float]], list[list[int]]]:
        batches.append(len(asks))
        time.sleep(0.1)
        return [[time.perf_counter()] * ask.new for ask in asks], [[7] * ask.new for ask in asks]

    monkeypatch.setattr("bench.peers.transformers_batches.generate", generate)
    asks = [Ask(0.0, [1], 1), Ask(0.0, [1], 2), Ask(1.5, [1], 1)]
    assert Batches(None).replay(asks, 0.3).tokens == [[7], [7, 7], [7]]
    assert Batches(None).replay(asks, 5.0).extra == {"batches": 1}
    assert batches == [2, 1, 3]
