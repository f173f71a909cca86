"""Attention over the blocks of the cache: the kernels of a GPU, interpreted on a CPU, against plain torch."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.graphs import device_memory, division, verify
from shapeshift.fused_decode.model.graphs.verify import verified
from shapeshift.fused_decode.model.network import AttentionLayer
from shapeshift.fused_decode.model.torch_operations import PLAIN, Rows, StepKernels, TorchOperations
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.fused_decode import families
from tests.fused_decode.compiled_attention import ROWS, launch
from tests.fused_decode.compiled_attention import SHAPES as COMPILED
from tests.fused_decode.decode_models import Tiny, batch, texts
from tests.fused_decode.test_decode_graphs import TOLERANCE, beside_chunks, open_model, reference
from tests.gpu_kernels import Recorder, interpreted, require_package

PROJECT = Path(__file__).resolve().parents[2]
ERRORS = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of a result, as a share of the largest value."""
SHARED_BYTES = {"75": 64 << 10, "86": 99 << 10, "90": 227 << 10}
"""What a program may have of a GPU's shared memory, by compute capability."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    score_cap: float = 0.0
    has_norms: bool = False


SHAPES = {
    "each head has keys": Shape(3, 3, 16),
    "heads share keys": Shape(8, 2, 32, has_norms=True),
    "one key for seven": Shape(7, 1, 16),
    "an odd width": Shape(4, 2, 40),
    "a window": Shape(4, 2, 16, window=70),
    "a short window": Shape(4, 1, 16, window=3),
    "a cap": Shape(4, 2, 16, score_cap=1.5, has_norms=True),
    "a cap and a window": Shape(2, 1, 16, window=100, score_cap=1.5),
}
# Each shape in f32, some in 16 bits.
GIVEN = [
    *((name, torch.float32) for name in SHAPES),
    *itertools.product(("heads share keys", "an odd width", "a cap and a window"), (torch.float16, torch.bfloat16)),
]
PLACES = (0, 1, 15, 16, 17, 63, 64, 200, 319)


@dataclass(frozen=True)
class Case:
    """Rows of one layer, whose texts lie in blocks of any order; all else is NaN.

    cache  [blocks, 2, kv_heads, BLOCK_TOKENS, head_dim], keys and values
    """

    shape: Shape
    cache: torch.Tensor
    qkv: torch.Tensor
    rows: Rows
    layer: AttentionLayer

    def run(self, attention: StepKernels, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and the cache after it, from numbers of this type."""
        cache, moved = self.cache.to(device, dtype, copy=True), _tensors(self.layer, device)
        layer = replace(self.layer, **moved | {"keys": cache[:, 0], "values": cache[:, 1]})
        rows = replace(self.rows, **_tensors(self.rows, device))
        found = TorchOperations(device, attention).attention(self.qkv.to(device, dtype), layer, (rows,))
        return found.cpu(), cache.cpu()


def _tensors(held: AttentionLayer | Rows, device: str) -> dict[str, Any]:
    """The tensors of `held`, on the device."""
    return {name: value.to(device) for name, value in vars(held).items() if isinstance(value, torch.Tensor)}


def case_of(shape: Shape, positions: torch.Tensor, context: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """positions: INT64 [rows, length], consecutive in each row; the last one may stand several times."""
    chance = torch.Generator().manual_seed(seed)
    count, blocks = len(positions), context // BLOCK_TOKENS
    cache = torch.full((count * blocks + 5, 2, shape.kv_heads, BLOCK_TOKENS, shape.head_dim), float("nan"))
    own = torch.randperm(len(cache), generator=chance)[: count * blocks].view(count, blocks)
    for row, first in enumerate(positions[:, 0].tolist()):
        held = torch.randn(2, shape.kv_heads, blocks * BLOCK_TOKENS, shape.head_dim, generator=chance)
        held[:, :, first:] = float("nan")
        # A window forgets what lies before it.
        held[:, :, : max(0, first + 1 - shape.window) if shape.window else 0] = float("nan")
        cache[own[row]] = held.view(2, shape.kv_heads, blocks, BLOCK_TOKENS, -1).permute(2, 0, 1, 3, 4)
    qkv = torch.randn(positions.numel(), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, generator=chance)
    places = positions.flatten().tolist()
    for token in range(1, len(places)):
        if places[token] == places[token - 1] and token % positions.shape[1]:
            qkv[token] = qkv[token - 1]
    angles = torch.rand(2, count + 1, context, shape.head_dim // 2, generator=chance) * 6
    norms = torch.rand(2, shape.head_dim, generator=chance) + 0.5
    layer = AttentionLayer(
        keys=cache[:, 0],
        values=cache[:, 1],
        cosines=angles[0].cos(),
        sines=angles[1].sin(),
        query_norm=norms[0] if shape.has_norms else None,
        key_norm=norms[1] if shape.has_norms else None,
        eps=1e-6,
        window=shape.window,
        scale=0.3,
        score_cap=shape.score_cap,
    )
    # The list of blocks is wider than the context, and beside other numbers, as in `StepInputs`.
    table = torch.randint(0, len(cache), (count, blocks + 3), generator=chance)
    table[:, 3:] = own
    slots = torch.randperm(count + 1, generator=chance)[:count]
    return Case(
        shape, cache.to(dtype).float(), qkv.to(dtype).float(), Rows(slice(None), positions, slots, table[:, 3:]), layer
    )


def check(case: Case, attention: StepKernels, dtype: torch.dtype, device: str = "cpu") -> None:
    expected, cache = case.run(PLAIN, torch.float32)
    found, held = case.run(attention, dtype, device)
    assert found.dtype == held.dtype == dtype
    assert (found.float() - expected).abs().max() <= ERRORS[dtype] * expected.abs().max()
    written = torch.zeros(len(cache), BLOCK_TOKENS, dtype=torch.bool)
    own = case.rows.blocks.gather(1, case.rows.positions // BLOCK_TOKENS)
    written[own, case.rows.positions % BLOCK_TOKENS] = True
    before, after, now = (one.float().transpose(2, 3).transpose(1, 2) for one in (case.cache, held, cache))
    assert torch.equal(after[~written].nan_to_num(7), before[~written].nan_to_num(7)), "only the places of the tokens"
    # The interpreter cuts off what does not fit into bf16.
    torch.testing.assert_close(after[written], now[written], atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    with interpreted("shapeshift.fused_decode.model.graphs.gpu_kernels") as found:
        yield found


@pytest.fixture
def attention(kernels: Any) -> StepKernels:
    found: StepKernels = kernels.KERNELS
    return found


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is split."""
    monkeypatch.setattr(division, "PROGRAMS", 1)


# Single tokens.


@pytest.mark.parametrize(("name", "dtype"), GIVEN, ids=str)
def test_single_tokens(attention: StepKernels, name: str, dtype: torch.dtype) -> None:
    check(case_of(SHAPES[name], torch.tensor(PLACES)[:, None], 320, dtype), attention, dtype)


@pytest.mark.parametrize("name", ["heads share keys", "a window", "a cap and a window"])
def test_single_tokens_that_are_not_split(attention: StepKernels, few_programs: None, name: str) -> None:
    check(case_of(SHAPES[name], torch.tensor(PLACES)[:, None], 320, torch.float32), attention, torch.float32)


def test_many_splits_of_which_few_have_places(attention: StepKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory held that no program has written must not matter."""
    made = torch.empty

    def poisoned(*sizes: Any, **named: Any) -> torch.Tensor:
        return made(*sizes, **named).fill_(float("nan"))

    shape, context = Shape(2, 1, 16), 20 * 64
    assert division.divide(2, 1, context, 2, 1, 16).splits == 20
    monkeypatch.setattr(torch, "empty", poisoned)
    check(case_of(shape, torch.tensor([[40], [1279]]), context, torch.float32), attention, torch.float32)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_text_beside_short_ones(attention: StepKernels, seed: int) -> None:
    positions = torch.randint(0, 100, (4, 1), generator=torch.Generator().manual_seed(seed))
    positions[seed] = 1000
    check(case_of(SHAPES["heads share keys"], positions, 1024, torch.float16, seed), attention, torch.float16)


# Chunks.


@pytest.mark.parametrize(("name", "dtype"), GIVEN, ids=str)
def test_a_chunk(attention: StepKernels, name: str, dtype: torch.dtype) -> None:
    """Filled up with its last token, and with tokens of the text before it."""
    positions = 90 + torch.arange(24).clamp(max=18)[None]
    check(case_of(SHAPES[name], positions, 128, dtype), attention, dtype)


@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 40), (15, 33), (160, 32)])
def test_chunks_of_all_lengths(attention: StepKernels, few_programs: None, start: int, length: int) -> None:
    positions = start + torch.arange(40).clamp(max=length - 1)[None]
    for name in ("a short window", "one key for seven"):
        check(case_of(SHAPES[name], positions, 208, torch.float32), attention, torch.float32)


# What they find.


def test_nan_of_a_text_stays_with_it(attention: StepKernels) -> None:
    """It is found by the request's logits; the texts beside it are not touched."""
    case = case_of(SHAPES["heads share keys"], torch.tensor([[300], [300], [70]]), 320, torch.float32)
    case.cache[case.rows.blocks[1, 2], :, :, 5] = float("nan")
    found, _ = case.run(attention, torch.float32)
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any()


def test_no_wait_for_what_the_device_holds(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory: grids and shapes come from bounds."""
    recorders = {name: Recorder(getattr(kernels, name)) for name in ("_place", "_attend", "_combine")}
    for name, recorder in recorders.items():
        monkeypatch.setattr(kernels, name, recorder)
    for shape, (rows, length) in itertools.product(COMPILED, ROWS):
        launch(kernels.KERNELS, torch.float16, rows, length, shape)
    assert all(len(recorder.launches) >= 4 for recorder in recorders.values())


@pytest.mark.slow
def test_they_compile_for_gpus_and_fit_into_their_memory(kernel_cache: Path) -> None:
    require_package()
    command = [sys.executable, "-m", "tests.fused_decode.compiled_attention"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernel_cache / "gpu")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = json.loads(done.stdout)
    assert wanted.keys() == SHARED_BYTES.keys()
    assert all(0 < size <= SHARED_BYTES[capability] for capability, size in wanted.items())


def test_what_is_compiled_does_not_depend_on_the_size_of_a_step(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for name in ("_place", "_attend", "_combine"):
        monkeypatch.setattr(kernels, name, Recorder(getattr(kernels, name)))
    for rows, length in ((1, 1), (7, 1), (40, 1), (100, 1), (1, 2), (1, 31), (1, 200), (3, 9), (1, 512)):
        launch(kernels.KERNELS, torch.float16, rows, length, (32, 8, 128, 0, 0.0))
    for name in ("_place", "_attend", "_combine"):
        found |= {(name, *sorted(named.items())) for _, named in getattr(kernels, name).launches}
    assert len(found) <= 1 + 4 + 2


# In a model.


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), [("qwen3", 2), ("mistral", 1)])
def test_steps_of_a_model(tiny: Callable[[str], Tiny], attention: StepKernels, family: str, count: int) -> None:
    """With rows that fill up, as `StepInputs.fill` writes them."""
    model, given = open_model(tiny(family), kernels=attention), texts(count, seed=15, shortest=60)
    model.memory.fill_(float("nan"))
    expected = reference(tiny(family), given)
    for text, place, logits in itertools.islice(beside_chunks(model, given, [4, 1], seed=16), 4 * count):
        assert (logits - expected[text][place]).abs().max() < TOLERANCE
    assert 64 in {bounds.chunk for bounds in model.graphs}


@pytest.mark.slow
def test_a_step_without_a_graph(tiny: Callable[[str], Tiny], attention: StepKernels) -> None:
    """Chunks of any lengths side by side."""
    model, given = open_model(tiny("qwen3"), kernels=attention), texts(4, seed=21)
    model.memory.fill_(float("nan"))
    expected, lengths = reference(tiny("qwen3"), given), [5, 1, 9, 5]
    for start in (0, 1):
        pieces = [text[start * size :][:size] for text, size in zip(given, lengths, strict=True)]
        logits = model.forward(batch(pieces, [3, 0, 5, 1], [start * size for size in lengths]))
        for row, (own, size) in enumerate(zip(expected, lengths, strict=True)):
            assert (logits[row] - own[(start + 1) * size - 1]).abs().max() < TOLERANCE
    assert not model.graphs


@pytest.mark.slow
def test_a_family_with_caps_and_windows(tmp_path: Path, attention: StepKernels) -> None:
    tiny = families.make("gemma2", tmp_path)
    model, (text,) = open_model(tiny, kernels=attention), texts(1, seed=17, shortest=60)
    model.memory.fill_(float("nan"))
    expected = families.reference_logits(tiny, text)
    for _, place, logits in itertools.islice(beside_chunks(model, [text], [3], seed=18), 5):
        assert (logits - expected[place]).abs().max() < TOLERANCE


# How a step is divided.


def test_programs_fill_a_gpu_and_no_split_is_long() -> None:
    for rows, context, kv_heads in itertools.product((1, 8, 32, 64), (64, 512, 4096, 65536), (1, 8, 32)):
        own = division.divide(rows, 1, context, 32, kv_heads, 128)
        assert own.lanes >= own.queries * 32 // kv_heads and own.queries == own.tiles == 1
        assert rows * kv_heads * own.splits >= division.PROGRAMS or own.splits == context // 64
        assert context / own.splits <= 1024
    assert division.divide(1, 1, 65536, 32, 8, 128, window=512).splits == 8


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (28, 4, 128), (8, 4, 256), (71, 1, 64)])
def test_tiles_hold_all_tokens_of_a_chunk(heads: int, kv_heads: int, head_dim: int) -> None:
    own = division.divide(1, 256, 2048, heads, kv_heads, head_dim)
    assert own.tiles * own.queries >= 256 > (own.tiles - 1) * own.queries
    assert own.queries * heads // kv_heads <= own.lanes and own.lanes.bit_count() == 1
    if heads // kv_heads <= 16:
        assert own.lanes * head_dim <= 8192


# Where they are used.


def test_they_are_used_on_a_gpu_where_the_package_is_installed() -> None:
    assert verify.step_kernels(on_gpu=False) is PLAIN
    assert (verify.step_kernels(on_gpu=True) is PLAIN) == (not verify.has_gpu_kernels())


@pytest.mark.parametrize("name", ["heads share keys", "a cap and a window"])
def test_kernels_that_are_right_are_taken(attention: StepKernels, name: str) -> None:
    case, said = case_of(SHAPES[name], torch.tensor([[3]]), 256, torch.bfloat16), list[str]()
    assert verified(attention, [case.layer], SHAPES[name].heads, said.append) is attention and not said


def test_kernels_that_are_wrong_or_fail_are_not_taken() -> None:
    case = case_of(SHAPES["heads share keys"], torch.tensor([[3]]), 256, torch.float32)

    def fail(*given: Any) -> None:
        raise RuntimeError("no compiler")

    def forget(queries: torch.Tensor, layer: AttentionLayer, rows: Rows, mixed: torch.Tensor) -> None:
        PLAIN.read(queries, layer, rows, mixed)
        mixed[-1] = float("nan")

    for read, reason in ((fail, "cannot run here: RuntimeError: no compiler"), (forget, "something else here, by inf")):
        said: list[str] = []
        assert verified(replace(PLAIN, read=read), [case.layer], 8, said.append) is PLAIN
        assert len(said) == 1 and reason in said[0]


def test_the_memory_plan_counts_what_the_kernels_need(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = Architecture.read(tiny("qwen3").folder)
    settings, found = FusedDecodeSettings(checkpoint="any", max_concurrency=32, max_length=8192), []
    for has_kernels in (False, True):
        monkeypatch.setattr(device_memory, "has_gpu_kernels", lambda has_kernels=has_kernels: has_kernels)
        parameter = device_memory.of_decode(architecture, settings, "bf16", 0)["device_memory"]
        found.append(json.loads(parameter)["graphs"])
    copied = 2 * 32 * 8192 * architecture.kv_width * 2 / 2**20
    assert copied / 2 < found[0] - found[1] < copied


def test_they_are_found_by_name() -> None:
    require_package()
    found = verify.step_kernels(on_gpu=True)
    assert found.name == "triton" and found.read is not PLAIN.read


# What only a GPU can show.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("it has no bf16")
    attention, shape = verify.step_kernels(on_gpu=True), SHAPES[name]
    assert attention.name == "triton"
    for positions in (torch.tensor(PLACES)[:, None], 90 + torch.arange(64).clamp(max=40)[None]):
        check(case_of(shape, positions, 320, dtype), attention, dtype, "cuda:0")
    check(case_of(shape, torch.tensor([[4000], [70]]), 4096, dtype), attention, dtype, "cuda:0")


@pytest.mark.gpu
def test_a_captured_graph_follows_texts_and_blocks() -> None:
    """Replayed with other positions and blocks than it was captured with."""
    shape, attention = SHAPES["a cap and a window"], verify.step_kernels(on_gpu=True)
    cases = [
        case_of(shape, torch.tensor(own)[:, None], 512, torch.float32, seed)
        for seed, own in enumerate(((3, 500), (511, 40)))
    ]
    cache, qkv = cases[0].cache.to("cuda:0"), cases[0].qkv.to("cuda:0")
    rows = replace(cases[0].rows, **_tensors(cases[0].rows, "cuda:0"))
    layer = replace(cases[0].layer, **_tensors(cases[0].layer, "cuda:0") | {"keys": cache[:, 0], "values": cache[:, 1]})
    operation, graph = TorchOperations("cuda:0", attention), torch.cuda.CUDAGraph()
    operation.attention(qkv, layer, (rows,))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        mixed = operation.attention(qkv, layer, (rows,))
    for case in reversed(cases):
        given = ((cache, case.cache), (qkv, case.qkv), (rows.positions, case.rows.positions))
        held = ((rows.blocks, case.rows.blocks), (rows.slots, case.rows.slots))
        tables = ((layer.cosines, case.layer.cosines), (layer.sines, case.layer.sines))
        for target, source in (*given, *held, *tables):
            target.copy_(source)
        graph.replay()
        expected, _ = case.run(PLAIN, torch.float32)
        torch.testing.assert_close(mixed.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_model_takes_them(tiny: Callable[[str], Tiny]) -> None:
    assert open_model(tiny("qwen3"), "cuda:0").kernels.name == "triton"
