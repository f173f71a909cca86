"""Ranks of tensor parallelism: what each reads, and real processes that serve, die, hang and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.fused_decode.front import GenerateFront
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.loading import load_runtime
from shapeshift.fused_decode.model.architecture import Architecture, from_config
from shapeshift.fused_decode.model.kv_cache import cache_bytes
from shapeshift.fused_decode.model.tensor_layout import shapes, weight_bytes
from shapeshift.fused_decode.model.weights import WeightFiles
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.launcher import RankProcess, device_of
from shapeshift.fused_decode.ranks.runtime import TensorParallelModel
from shapeshift.fused_decode.ranks.shards import RankWeights, layer_parts
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests import waiting
from tests.fakes import PbUtils, Request, TritonError, logger
from tests.fused_decode.checkpoints import make_checkpoint
from tests.fused_decode.decode_models import batch
from tests.fused_decode.families import CASES
from tests.fused_decode.fronts import answer_of, arguments, ask, values_of
from tests.fused_decode.rank_groups import connected, spec
from tests.outgoing import socket_inodes

PROJECT = Path(__file__).resolve().parents[2]
wait_for = partial(waiting.wait_for, timeout_s=120.0)
# Longer than a block of the cache, so that a request that comes again shares one.
PROMPT = "Return the number of items in a container. Raise ValueError."
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "small")


# Which part of a model a rank has.


def is_divided(case: str) -> bool:
    a = from_config(CASES[case])
    return a.experts is None and not a.varied and a.qk_norm != "row"


@pytest.mark.parametrize("case", [case for case in CASES if is_divided(case)])
def test_the_ranks_divide_every_split_tensor(case: str) -> None:
    whole = from_config(CASES[case])
    wanted = shapes(whole)
    for name in layer_parts(whole, 0, 2):
        shape = wanted.get(f"{whole.tensors.layers}.0.{name}")
        if shape is None:
            continue
        parts = [layer_parts(whole, rank, 2)[name] for rank in range(2)]
        places = sorted(place for part in parts for first, end in part.ranges for place in range(first, end))
        assert places == list(range(shape[parts[0].dimension])), name


def test_the_parts_that_ranks_read_are_the_whole(folder: Path) -> None:
    whole = Architecture.read(folder)
    complete = WeightFiles(folder, whole)
    files = [RankWeights(folder, whole, rank, 2) for rank in range(2)]
    down = [one.linear(0, "down", torch.float32)[0] for one in files]
    qkv = [one.linear(0, "qkv", torch.float32)[0] for one in files]
    heads = [one.read("lm_head.weight", torch.float32) for one in files]
    assert torch.equal(torch.cat(down, dim=1), complete.linear(0, "down", torch.float32)[0])
    query, key = whole.query_width // 2, whole.kv_width // 2
    pieces = [one.split([query, key, key]) for one in qkv]
    joined = torch.cat([torch.cat(pair) for pair in zip(*pieces, strict=True)])
    assert torch.equal(joined, complete.linear(0, "qkv", torch.float32)[0])
    assert torch.equal(torch.cat(heads), complete.read("model.embed_tokens.weight", torch.float32))


def test_the_memory_is_that_of_all_ranks(folder: Path) -> None:
    whole = Architecture.read(folder)
    share, table = whole.share(2), whole.vocab_size * whole.hidden * 4
    assert 2 * cache_bytes(share, 3, 64, "f32") == cache_bytes(whole, 3, 64, "f32")
    norms = 2 * whole.layers * whole.hidden * 4 + whole.hidden * 4
    assert weight_bytes(whole, "f32", ranks=2) == weight_bytes(whole, "f32") + table + norms


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, "tensor_parallel_size: got 0; 1 to 64"),
        (65, "tensor_parallel_size: got 65; 1 to 64"),
        (3, r"tensor_parallel_size: got 3; a divisor of num_attention_heads \(4\)"),
        (4, r"tensor_parallel_size: got 4; a divisor of num_key_value_heads \(2\)"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused(
    folder: Path, kernel_cache: Path, ranks: int, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        stated = FusedDecodeSettings(checkpoint=str(folder), precision="f32", tensor_parallel_size=ranks)
        load_runtime(folder, stated, kernel_cache, "cpu", logger())


def test_gpus_follow_that_of_rank_0() -> None:
    assert [device_of("cuda:2", rank) for rank in range(3)] == ["cuda:2", "cuda:3", "cuda:4"]
    assert device_of("cpu", 3) == "cpu"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_sum_of_a_row_does_not_depend_on_the_other_rows(ranks: int, tmp_path: Path) -> None:
    rows = torch.randn(ranks, 9, 64, generator=torch.Generator().manual_seed(1))
    groups = [RankGroup(rank, ranks) for rank in range(ranks)]

    def summed(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        group.connect(tmp_path / "meeting")
        return group.sum(rows[group.rank].clone()), group.sum(rows[group.rank, 8:].clone())

    with ThreadPoolExecutor(ranks) as executor:
        for whole, alone in executor.map(summed, groups):
            assert torch.equal(whole[8:], alone) and torch.allclose(whole, rows.sum(0), atol=1e-5)


def test_ranks_quantise_their_parts_of_the_cache_alike(folder: Path, kernel_cache: Path, tmp_path: Path) -> None:
    def logits(ranks: int, kv_precision: str) -> torch.Tensor:
        options = {"kernel_cache": str(kernel_cache), "kv_precision": kv_precision}
        given = [torch.arange(2, 42), torch.arange(50, 75)]
        with connected(folder, ranks, tmp_path / f"{ranks}{kv_precision}", **options) as members:
            return members.forward(batch(given, [0, 2], [0, 0])).clone()

    alone, both = logits(1, "int8"), logits(2, "int8")
    lost = (alone - logits(1, "auto")).abs().max()
    # A rounding of the sums may move a value to the next level.
    assert lost > 1e-3 and (both - alone).abs().max() < lost / 3


# Processes.


# Of a greedy request, and of a beam search.
Answers = tuple[str, list[str]]


@pytest.fixture(scope="module")
def pb_utils() -> PbUtils:
    return PbUtils()


@pytest.fixture(scope="module")
def front(folder: Path, kernel_cache: Path, pb_utils: PbUtils) -> Iterator[GenerateFront]:
    """Two ranks of one thread, with a process for the second."""
    stated = {"checkpoint": folder, "precision": "f32", "max_length": 2048, "max_concurrency": 4, "slo_ms": 0}
    threads = torch.get_num_threads()
    given = arguments("generate", **stated, tensor_parallel_size=2, threads=2, kernel_cache=kernel_cache)
    made = GenerateFront(pb_utils, given)
    torch.set_num_threads(threads)
    yield made
    pid = child_of(made)
    made.close()
    assert has_ended(pid)
    made.loop.check_integrity()
    assert made.loop.slots.used == len(made.loop.admission) == 0


@pytest.fixture(scope="module")
def alone(folder: Path, kernel_cache: Path) -> Iterator[Answers]:
    """The answers of one process: see `answer` and `searched`."""
    stated = {"checkpoint": folder, "precision": "f32", "max_length": 2048, "threads": 1, "kernel_cache": kernel_cache}
    threads = torch.get_num_threads()
    made = GenerateFront(PbUtils(), arguments("generate", **stated))
    torch.set_num_threads(threads)
    yield answer(made), searched(made)
    made.close()


def model_of(front: GenerateFront) -> TensorParallelModel:
    found = front.loaded.runtime
    assert isinstance(found, TensorParallelModel)
    return found


def child_of(front: GenerateFront) -> int:
    (pid,) = model_of(front).launcher.pids
    return pid


def answer(front: GenerateFront) -> str:
    request = ask(PROMPT, max_tokens=24)
    front.execute([request])
    return str(answer_of(request)["text_output"])


def searched(front: GenerateFront) -> list[str]:
    """The answers of a beam search, whose forks copy blocks."""
    request = ask(PROMPT, max_tokens=24, num_beams=3, num_return_sequences=3)
    front.execute([request])
    return [bytes(text).decode() for text in values_of(request.sender.answer())["text_output"].tolist()]


def running(front: GenerateFront) -> Request:
    """A request that has got its first text, and does not end by itself."""
    request = ask("The", stream=True, max_tokens=2000, ignore_eos=True)
    front.execute([request])
    wait_for(lambda: request.sender.responses)
    return request


def error_of(request: Request) -> tuple[int, str]:
    error = request.sender.stream()[-1].error()
    assert error is not None
    return error.code(), error.message()


def has_ended(pid: int) -> bool:
    """A process that nobody has collected has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_two_processes_answer_as_one(front: GenerateFront, alone: Answers, pb_utils: PbUtils) -> None:
    assert (answer(front), searched(front)) == alone
    assert len({*alone[1]}) == 3
    logged = "\n".join(pb_utils.Logger.lines)
    assert "1 threads in each of 2 ranks" in logged and f"2 ranks: this process, and {child_of(front)}" in logged


def test_ranks_listen_on_the_loopback_interface_alone(front: GenerateFront) -> None:
    inodes = socket_inodes(child_of(front))
    listening = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    found = [fields[1].partition(":")[0] for fields in listening if fields[9] in inodes]
    assert found and set(found) == {"0100007F"}


def test_a_killed_rank_costs_the_running_requests_alone(front: GenerateFront, alone: Answers) -> None:
    """The next ones are served, and share no block that the new process lacks."""
    assert answer(front) == alone[0]
    assert front.loop.slots.pool.caching and len(PROMPT) > BLOCK_TOKENS
    killed, request = child_of(front), running(front)
    os.kill(killed, signal.SIGKILL)
    code, message = error_of(request)
    assert code == TritonError.INTERNAL and f"rank 1 (pid {killed}) has ended with -9" in message
    late = ask(PROMPT, parameters={"latency_ms": 50})
    front.execute([late])
    code, message = late.refusal()
    assert code == TritonError.UNAVAILABLE, "a deadline holds while the ranks start"
    hits = front.loop.metrics.prefix_hits.value
    assert answer(front) == alone[0]
    assert front.loop.metrics.prefix_hits.value == hits
    assert child_of(front) != killed and has_ended(killed)


def test_a_rank_that_dies_while_nothing_runs_costs_no_request(front: GenerateFront, alone: Answers) -> None:
    os.kill(child_of(front), signal.SIGKILL)
    wait_for(model_of(front).launcher.ended)
    assert answer(front) == alone[0]


def test_a_rank_that_hangs_is_replaced(front: GenerateFront, alone: Answers) -> None:
    stopped, request = child_of(front), running(front)
    os.kill(stopped, signal.SIGSTOP)
    code, message = error_of(request)
    assert code == TritonError.INTERNAL and "a rank has failed, or given no answer within" in message
    assert answer(front) == alone[0]
    assert has_ended(stopped)


@pytest.mark.long
def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    child = RankProcess(spec(tmp_path / "nothing", 1, 2))
    with pytest.raises(EngineError, match=r"rank 1: InvalidInputError: checkpoint: got .*must hold a readable config"):
        child.wait(60.0)
    child.kill()
    child.kill()


PARENT = """
import sys, time, torch
from pathlib import Path
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.launcher import Launcher
from shapeshift.fused_decode.ranks.member import to_bytes
from tests.fused_decode.decode_models import batch
from tests.fused_decode.rank_groups import spec

group = RankGroup(0, 2)
launcher = Launcher(spec(Path(sys.argv[1]), 0, 2, native=False), group)
launcher.start()
launcher.connect()
launcher.send(to_bytes(batch([torch.arange(4)], [0], [0]), [], []))
print(*launcher.pids, flush=True)
time.sleep(600)
"""


def test_a_child_ends_with_its_parent(folder: Path) -> None:
    """It waits in a step for a parent that is killed and never computes its part."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True, cwd=PROJECT
    ) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert not has_ended(child)
        finally:
            parent.kill()
        wait_for(lambda: has_ended(child), timeout_s=5.0)
