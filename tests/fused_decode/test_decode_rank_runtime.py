"""The runtime over several processes, with a launcher and a model that are fakes: limits, failures, starting again."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shapeshift.engines.hardware import cores
from shapeshift.errors import EngineError, InvalidInputError, UnsupportedError
from shapeshift.fused_decode.interfaces import StepBatch, blocks_of
from shapeshift.fused_decode.ranks import runtime
from shapeshift.fused_decode.ranks.collective import LONGEST_S
from shapeshift.fused_decode.ranks.member import RankSpec, to_bytes
from shapeshift.fused_decode.ranks.runtime import TensorParallelModel
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.fakes import logger
from tests.fused_decode.decode_models import batch
from tests.waiting import wait_for

BATCH: StepBatch = batch([torch.tensor([5, 6])], slots=[0], starts=[0])


class FakeLauncher:
    """calls: what was done, in order. dead: why a rank has ended; may_start: start() waits for it."""

    pids = (11, 12)

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.dead = ""
        self.fails: Exception | None = None
        self.may_start = threading.Event()
        self.may_start.set()

    def start(self) -> None:
        assert self.may_start.wait(120)
        self.calls.append("start")
        if self.fails is not None:
            raise self.fails

    def connect(self) -> None:
        self.calls.append("connect")

    def stop(self) -> None:
        self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")

    def send(self, message: bytes) -> None:
        self.calls.append(message)

    def ended(self, wait_s: float = 0.0) -> str:
        return self.dead


class FakeModel:
    """Of rank 0. fails: what a step raises."""

    vocab_size, eos_ids, slots, max_length, blocks, shares_prefixes = 10, frozenset({1}), 2, 64, 8, True

    def __init__(self) -> None:
        self.copies: list[tuple[list[int], list[int]]] = []
        self.fails: Exception | None = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if self.fails is not None:
            raise self.fails
        return torch.ones(1, self.vocab_size)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        self.copies.append((sources, targets))


class Made:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.model, self.launcher = FakeModel(), FakeLauncher()
        self.group = SimpleNamespace(timeout_s=0.0)
        model, group, launcher = (cast(Any, one) for one in (self.model, self.group, self.launcher))
        self.runtime = TensorParallelModel(model, group, launcher, logger(self.log))

    def restarted(self) -> None:
        """Wait until the ranks have been started again, or could not be."""
        starting = self.runtime.starting
        assert starting is not None
        wait_for(starting.done)


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.mark.parametrize(
    ("longest_s", "limit_s"), [(0.0, LONGEST_S), (0.001, 4.0), (0.8, 4.0), (0.9, 4.5), (10.0, 50.0)]
)
def test_a_step_may_take_five_of_the_longest_and_at_least_four_seconds(
    made: Made, longest_s: float, limit_s: float
) -> None:
    made.runtime.longest_step_s = longest_s
    assert made.runtime.forward(BATCH).shape == (1, 10)
    assert made.group.timeout_s == pytest.approx(limit_s)


def test_blocks_are_copied_here_at_once_and_elsewhere_before_the_next_step_alone(made: Made) -> None:
    made.runtime.copy_blocks([1, 2], [3, 4])
    made.runtime.copy_blocks([5], [6])
    assert made.model.copies == [([1, 2], [3, 4]), ([5], [6])]
    for _ in range(2):
        made.runtime.forward(BATCH)
    assert made.launcher.calls == [to_bytes(BATCH, [1, 2, 5], [3, 4, 6]), to_bytes(BATCH, [], [])]


def test_a_rank_that_ended_between_steps_is_replaced_and_said_once(made: Made) -> None:
    assert made.runtime.ready() and made.launcher.calls == []
    made.launcher.dead = "rank 1 has ended"
    with pytest.raises(EngineError, match="^rank 1 has ended$"):
        made.runtime.ready()
    made.launcher.dead = ""
    made.restarted()
    assert made.launcher.calls == ["stop", "start", "connect"]
    assert made.runtime.ready() and made.runtime.starting is None
    assert made.log[-1].startswith("3 ranks: this process, and 11, 12, again after 0.")


def test_the_loop_is_not_ready_while_ranks_start(made: Made) -> None:
    made.launcher.may_start.clear()
    made.launcher.dead = "gone"
    with pytest.raises(EngineError):
        made.runtime.ready()
    made.launcher.dead = ""
    assert not made.runtime.ready()
    made.launcher.may_start.set()
    made.restarted()
    assert made.runtime.ready()


@pytest.mark.parametrize(
    ("error", "dead", "said"),
    [
        (RuntimeError("reset"), "rank 1 has ended", "rank 1 has ended"),
        (OSError("reset"), "", "a rank has failed, or given no answer within 600 s"),
    ],
)
def test_a_step_that_a_rank_breaks_fails_with_the_reason(made: Made, error: Exception, dead: str, said: str) -> None:
    made.model.fails, made.launcher.dead = error, dead
    made.runtime.copy_blocks([1], [2])
    with pytest.raises(EngineError, match=f"^{said}$"):
        made.runtime.forward(BATCH)
    made.restarted()
    assert made.log[0] == f"{said}: reset"
    made.model.fails, made.launcher.dead = None, ""
    made.runtime.forward(BATCH)
    # The new processes have no cache to copy in.
    assert made.launcher.calls[-1] == to_bytes(BATCH, [], [])
    assert made.runtime.starting is None


def test_any_other_failure_of_a_step_stays_what_it_is_and_starts_the_ranks_again(made: Made) -> None:
    made.model.fails = KeyError("other")
    with pytest.raises(KeyError, match="other"):
        made.runtime.forward(BATCH)
    made.restarted()
    assert made.launcher.calls[1:] == ["stop", "start", "connect"]


def test_ranks_that_cannot_start_again_fail_the_next_step_which_tries_again(made: Made) -> None:
    made.launcher.dead, made.launcher.fails = "gone", OSError("no memory")
    with pytest.raises(EngineError, match="gone"):
        made.runtime.ready()
    made.restarted()
    made.launcher.dead = ""
    assert made.runtime.ready(), "the next step raises it"
    with pytest.raises(EngineError, match="^the ranks do not start: no memory$"):
        made.runtime.forward(BATCH)
    assert "the ranks do not start: no memory" in made.log
    made.launcher.fails = None
    wait_for(lambda: made.launcher.calls.count("start") == 2)


# From the settings to the ranks.


def spec(device: str = "cpu", precision: str = "f32", **settings: Any) -> RankSpec:
    stated = {"max_concurrency": 3, "max_length": 100, "tensor_parallel_size": 2} | settings
    return runtime.spec_of(Path("m"), FusedDecodeSettings("m", **stated), precision, device, Path("k"))


@pytest.mark.parametrize(("ranks", "threads", "own"), [(2, 5, 2), (4, 3, 1), (1, 2, 2), (1, 0, cores())])
def test_the_threads_are_divided_among_the_ranks(ranks: int, threads: int, own: int) -> None:
    found = spec(tensor_parallel_size=ranks, threads=threads)
    assert (found.rank, found.ranks, found.threads) == (0, ranks, own)
    assert (found.slots, found.max_length, found.blocks) == (3, 100, blocks_of(0))
    assert (found.folder, found.kernel_cache) == (str(Path("m").resolve()), str(Path("k").resolve()))


def test_as_many_gpus_as_ranks_follow_the_first() -> None:
    devices = torch.cuda.device_count()
    with pytest.raises(UnsupportedError, match=f"got 2 from cuda:{devices} on; torch finds {devices} CUDA devices"):
        spec(f"cuda:{devices}")
    if devices > 1:
        assert spec(f"cuda:{devices - 2}").device == f"cuda:{devices - 2}"


def test_what_ranks_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="^precision: got 'int8'"):
        spec(precision="int8")
    decode = FusedDecodeSettings("m", tensor_parallel_size=2)
    options: dict[str, Any] = {"precision": "f32", "device": "cpu", "kernel_cache": Path("k"), "checkpoint_sha256": ""}
    with pytest.raises(InvalidInputError, match="^tensor_parallel_size: got 2; 1 for a model that shares its cache"):
        runtime.load(Path("m"), decode, **options, extra_elements=1, log=logger())
