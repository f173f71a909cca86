"""The processes that generate for a benchmark: their protocol, and their end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from bench.fused_decode.loads import Load
from bench.fused_decode.systems import DecodeWorker
from bench.peers.protocol import DecodeRequest, replay_in_steps, send
from shapeshift.errors import UnsupportedError

ECHO = """
import os, sys, multiprocessing, time
from bench.peers.protocol import Replayed, serve_decoding
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
child.start()
def replay(requests, num_beams=0):
    print("noise")
    if not requests[0].prompt:
        sys.exit("last words")
    stamps = [[request.at_s + 0.5 * at for at in range(request.new_tokens)] for request in requests]
    tokens = [request.prompt * request.new_tokens for request in requests]
    return Replayed(stamps, tokens, {"child": child.pid, "num_beams": num_beams})
serve_decoding(replay)
"""


@pytest.fixture
def worker(tmp_path: Path) -> DecodeWorker:
    return DecodeWorker("echo", [sys.executable, "-c", ECHO], tmp_path / "echo.log")


def test_requests_and_answers_pass(worker: DecodeWorker) -> None:
    worker.wait_ready()
    replayed = worker.replay(Load("x", [DecodeRequest(0.0, [3], 2), DecodeRequest(1.0, [4], 1)])).replayed
    assert replayed.stamps == [[0.0, 0.5], [1.0]] and replayed.tokens == [[3, 3], [4]]
    assert replayed.extra["num_beams"] == 0
    now, most = worker.memory_mb()
    assert 1.0 < now <= most
    searched = worker.replay(Load("x", [DecodeRequest(0.0, [3], 1)]), num_beams=4)
    assert searched.replayed.extra["num_beams"] == 4
    child = int(replayed.extra["child"])
    os.kill(child, 0)
    worker.stop()
    end = time.monotonic() + 120
    while time.monotonic() < end and Path(f"/proc/{child}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_a_worker_that_ends_is_named_with_its_log(worker: DecodeWorker) -> None:
    worker.wait_ready()
    with pytest.raises(UnsupportedError, match=r"echo exited with status 1(?s:.*)last words"):
        worker.replay(Load("x", [DecodeRequest(0.0, [], 1)]))
    worker.stop()


def test_requests_are_sent_in_the_order_of_their_instants() -> None:
    sent: list[tuple[int, float]] = []
    start = send(
        [DecodeRequest(0.05, [], 1), DecodeRequest(0.0, [], 1)],
        lambda number, request: sent.append((number, time.perf_counter())),
    )
    while len(sent) < 2:
        time.sleep(0.01)
    assert [number for number, _ in sent] == [1, 0]
    assert sent[0][1] >= start and sent[1][1] >= start + 0.05


class Counting:
    """Gives each running request the next number in a step; records how many ran at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sizes: list[int] = []
        self._running: dict[int, int] = {}

    def add(self, number: int, request: DecodeRequest) -> None:
        self._running[number] = request.prompt[0]

    def step(self) -> list[tuple[int, list[int]]]:
        self.sizes.append(len(self._running))
        self._running = {number: last + 1 for number, last in self._running.items()}
        return [(number, [last]) for number, last in self._running.items()]

    def drop(self, number: int) -> None:
        del self._running[number]


def test_requests_join_and_leave_between_steps() -> None:
    stepper = Counting(most=2)
    replayed = replay_in_steps(stepper, [DecodeRequest(0.0, [10 * at], 1 + at) for at in range(3)])
    assert replayed.tokens == [[1], [11, 12], [21, 22, 23]]
    assert max(stepper.sizes) == 2 and replayed.extra["iterations"] == len(stepper.sizes)
    assert all(stamps == sorted(stamps) and stamps[0] > 0 for stamps in replayed.stamps)
