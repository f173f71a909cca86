"""Threads of the model that generates, and of the one that forwards, that hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shapeshift.fused_decode import loading
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.unary import UnaryFront
from tests.fakes import PbUtils, as_served, logger
from tests.fused_decode.fake_client import FakeClient
from tests.fused_decode.fronts import answer_of, arguments, ask
from tests.fused_decode.toy import ToyRuntime, save_tokenizer
from tests.stalls import only_stalled, watched, without_patience
from tests.waiting import wait_for


class SlowToy(ToyRuntime):
    """A toy for which each token of a batch takes 10 ms of `now`."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_step_s = 0.7
        self.threads: list[str] = []

    def forward(self, batch: StepBatch) -> torch.Tensor:
        time.sleep(0.001 * len(batch.tokens))
        self.threads.append(threading.current_thread().name)
        return super().forward(batch)


@pytest.fixture
def toy() -> SlowToy:
    return SlowToy()


@pytest.fixture
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture
def front(tmp_path: Path, toy: SlowToy, pb_utils: PbUtils) -> Iterator[GenerateFront]:
    stated = {"max_length": toy.max_length, "checkpoint": save_tokenizer(tmp_path / "toy")}
    args = arguments("generate", **stated)
    made = GenerateFront(pb_utils, args, loading.load(args, logger(pb_utils.Logger.lines), lambda *_: toy))
    yield made
    toy.open.set()
    made.close()


def test_the_longest_step_is_that_of_a_full_piece_of_a_prompt(toy: SlowToy) -> None:
    assert loading.measure_longest_step_s(toy, 16) >= 0.016
    assert loading.measure_longest_step_s(toy, 1000) >= 0.064
    assert toy.steps == [([0], [16]), ([0], [toy.max_length])]
    # The thread that measured has ended, and with it its pool of OpenMP threads.
    assert not {thread.name for thread in threading.enumerate()} & set(toy.threads)


def test_the_limit_follows_the_longest_step(front: GenerateFront, toy: SlowToy) -> None:
    assert front.loop.steps.limit_s == 10 * toy.longest_step_s == 7.0


def test_the_decode_loop(front: GenerateFront, toy: SlowToy, pb_utils: PbUtils) -> None:
    front.loop.steps.limit_s = 0.0
    request = ask()
    with only_stalled(pb_utils, "decode", toy.open.set):
        toy.open.clear()
        front.execute([request])
    assert answer_of(request)["text_output"]
    assert watched(pb_utils) == {"execute", "responses", "errors", "decode"}


def test_requests_that_wait_for_a_slot_are_no_stall(front: GenerateFront, toy: SlowToy) -> None:
    """A loop that runs and admits nobody does steps all the same."""
    front.loop.admission.admit = lambda free, fits=None, shared=None: []  # type: ignore[method-assign]
    request = ask()
    front.execute([request])
    steps = front.loop.steps.steps
    wait_for(lambda: front.loop.steps.steps > steps + 5)
    assert front.loop.steps.has_work


def test_the_thread_that_forwards(pb_utils: PbUtils, monkeypatch: pytest.MonkeyPatch) -> None:
    without_patience(monkeypatch)
    client, opened = FakeClient(pb_utils), threading.Event()
    client.dead["generate"] = "there is no such request"
    pb_utils.models["generate"] = None
    front = as_served(UnaryFront(pb_utils, arguments("generate_unary"), client))
    front.steps()[0].limit_s = 1.2

    async def hang() -> None:
        assert opened.wait(120)

    try:
        front.execute([ask(decoupled=False)])
        wait_for(lambda: client.calls)
        wait_for(lambda: watched(pb_utils) == {"execute", "responses", "errors", "grpc-client"})
        with only_stalled(pb_utils, "grpc-client", opened.set):
            front.thread.start(hang())
    finally:
        opened.set()
        front.close()
