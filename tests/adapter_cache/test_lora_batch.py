"""Many adapters in one batch: the kernels against one another, and the whole model against PEFT."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shapeshift.adapter_cache.lora import native
from shapeshift.adapter_cache.lora.batch import (
    BatchAdapters,
    LoraDelta,
    LoraHook,
    LoraKernels,
    adaptable_of_decoder,
    group_tokens,
    lay_out,
    shifted,
)
from shapeshift.adapter_cache.lora.segmented import TorchLora
from shapeshift.adapter_cache.memory.adapter_table import make_adapter
from shapeshift.adapter_cache.memory.loader import Store, load_weights
from shapeshift.adapter_cache.registry import peft, store
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.interfaces import LINEARS, Groups, LowRank, StepBatch
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from tests.adapter_cache import lora_models
from tests.adapter_cache.lora_models import ATTENTION, Spec, peft_logits
from tests.compiled import KERNELS
from tests.fused_decode import families
from tests.fused_decode.checkpoints import VOCABULARY
from tests.fused_decode.decode_models import VOCAB
from tests.sampling import few

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 0.06}
SLOTS = 8
TORCH = TorchLora()


@pytest.fixture(scope="module")
def base(small_base: Path) -> Path:
    return small_base


@pytest.fixture(scope="module")
def adapters(mixed_adapters: dict[str, Path]) -> dict[str, Path]:
    return mixed_adapters


@pytest.fixture(scope="module")
def kernels() -> native.NativeLora:
    found = native.load(KERNELS, lambda text: None)
    if found is None:
        pytest.skip("no compiler")
    return found


def loaded(base: Path, folders: list[Path], dtype: torch.dtype, write: Store = TORCH.store) -> BatchAdapters:
    """These adapters one behind the other in one buffer, after some other elements."""
    architecture = Architecture.read(base)
    model = peft.BaseModel.of_decoder(architecture, {base.name}, 128, base)
    records = [make_adapter(folder.name, store.digest(folder), peft.read(folder, model), 4) for folder in folders]
    memory = torch.full((96 + sum(one.elements for one in records),), float("nan"), dtype=dtype)
    start, found = 96, []
    for one in records:
        load_weights(memory[start : start + one.elements], one, write)
        found.append(shifted(one.relative, start))
        start += one.elements
    return BatchAdapters(memory, torch.stack(found))


# The kernels.


def test_tokens_are_grouped_by_adapter() -> None:
    found = group_tokens(np.array([2, -1, 0, 2, 0, -1]), 3)
    assert [tokens.tolist() for tokens in found.each()] == [[2, 4], [], [0, 3]]
    assert found.tokens == 6


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1, 1), (0, 3, 1, 9, 2, 5), (40, 0, 0, 0, 7, 1)])
def test_kernels_agree(
    base: Path, adapters: dict[str, Path], kernels: LoraKernels, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    held = loaded(base, list(adapters.values()), dtype)
    rng, chance = random.Random(0), torch.Generator().manual_seed(0)
    owners = [adapter for adapter, count in enumerate(counts) for _ in range(count)] + [-1] * 4
    rng.shuffle(owners)
    a = Architecture.read(base)
    inputs = {0: a.hidden, 1: a.query_width, 2: a.hidden, 3: a.intermediate}
    outputs = {0: a.query_width + 2 * a.kv_width, 1: a.hidden, 2: 2 * a.intermediate, 3: a.hidden}
    deltas = [LoraDelta(each.prepare(held), np.array(owners), len(adapters)) for each in (TORCH, kernels)]
    changed = 0
    for layer in range(a.layers):
        for linear in range(LINEARS):
            rows = torch.randn(len(owners), inputs[linear], generator=chance).to(dtype)
            before = torch.randn(len(owners), outputs[linear], generator=chance).to(dtype)
            plain, fast = (before.clone() for _ in deltas)
            for delta, out in zip(deltas, (plain, fast), strict=True):
                delta.add(layer, linear, rows, out)
            assert torch.allclose(fast.float(), plain.float(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
            without = torch.tensor([owner < 0 for owner in owners])
            assert torch.equal(fast[without], before[without])
            changed += int((plain != before).any())
    assert changed == a.layers * LINEARS


def test_a_subset_of_the_tokens(base: Path, adapters: dict[str, Path], kernels: LoraKernels) -> None:
    held = loaded(base, list(adapters.values())[:2], torch.float32)
    whole = LoraDelta(kernels.prepare(held), np.array([1, -1, 0, 1]), 2)
    kept = whole.subset(torch.tensor([3, 0]))
    assert kept is not None
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    all_out, some_out = torch.zeros(4, 128), torch.zeros(2, 128)
    whole.add(0, 0, rows, all_out)
    kept.add(0, 0, rows[[3, 0]].contiguous(), some_out)
    assert torch.allclose(some_out, all_out[[3, 0]], atol=1e-5)
    assert whole.subset(torch.tensor([1])) is None
    assert whole.subset(torch.arange(4)) is whole


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_native_stores_are_the_same(
    base: Path, adapters: dict[str, Path], kernels: native.NativeLora, dtype: torch.dtype
) -> None:
    folders = list(adapters.values())
    plain, fast = loaded(base, folders, dtype), loaded(base, folders, dtype, kernels.store)
    assert torch.equal(plain.memory.nan_to_num(7), fast.memory.nan_to_num(7))
    assert torch.equal(plain.places, fast.places)
    for source in (torch.float16, torch.bfloat16, torch.float32):
        given = torch.randn(7, 35, generator=torch.Generator().manual_seed(1)).to(source)
        targets = torch.zeros(2, 245, dtype=dtype)
        assert TORCH.store(targets[0], given, True, 0.5) and kernels.store(targets[1], given, True, 0.5)
        assert torch.equal(*targets)
        given[3, 3] = float("inf")
        assert not TORCH.store(targets[0], given, True, 0.5)
        assert not kernels.store(targets[1], given, True, 0.5)


def test_places_outside_the_memory_are_refused(base: Path, adapters: dict[str, Path], kernels: LoraKernels) -> None:
    held = loaded(base, [adapters["small"]], torch.float32)
    rows, out = torch.zeros(1, 64), torch.zeros(1, 128)
    for field, value in ((0, len(held.memory)), (0, -1), (1, -2), (2, 120), (3, 500)):
        wrong = held.places.clone()
        wrong[0, 0, 0, 0, field] = value
        term = LoraDelta(kernels.prepare(BatchAdapters(held.memory, wrong)), np.array([0]), 1)
        with pytest.raises(RuntimeError, match="lies outside"):
            term.add(0, 0, rows, out)


def test_places_do_not_overlap(base: Path, adapters: dict[str, Path]) -> None:
    architecture = Architecture.read(base)
    factors = peft.read(adapters["large"], peft.BaseModel.of_decoder(architecture, {base.name}, 128, base)).factors
    relative, elements = lay_out(adaptable_of_decoder(architecture), factors)
    widths = {0: 64, 1: 64, 2: 64, 3: 128}
    spans = sorted(
        (offset, offset + rank * (widths[linear] + outputs))
        for layer in relative.tolist()
        for linear, linear_places in enumerate(layer)
        for offset, rank, _, outputs in linear_places
        if rank
    )
    assert len(spans) == len(factors)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][1] <= elements


# The whole model.


@pytest.fixture(scope="module")
def texts(adapters: dict[str, Path]) -> list[tuple[str | None, torch.Tensor]]:
    rng = random.Random(3)
    names = [*adapters, None, "small"]
    return [(name, torch.tensor([rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 40))])) for name in names]


@pytest.fixture(scope="module")
def expected(base: Path, adapters: dict[str, Path], texts: list[tuple[str | None, torch.Tensor]]) -> list[torch.Tensor]:
    return peft_logits(base, adapters, texts)


def model_with(
    base: Path,
    adapters: dict[str, Path],
    precision: str,
    kernels: LoraKernels,
    has_magnitudes: Callable[[int], bool] = lambda number: False,
) -> DecodeModel:
    model = DecodeModel.load(
        base,
        ModelOptions(precision=precision, slots=SLOTS, max_length=64, threads=2, cache_dir=KERNELS),
        lambda text: None,
    )
    held = loaded(base, list(adapters.values()), model.memory.dtype)

    def places_of(numbers: list[int]) -> tuple[list[torch.Tensor], int]:
        return [held.places[number] for number in numbers], 0

    model.linear_hook = LoraHook(held.memory, places_of, kernels, has_magnitudes)
    return model


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_each_row_is_what_peft_computes_alone(
    base: Path,
    adapters: dict[str, Path],
    kernels: LoraKernels,
    texts: list[tuple[str | None, torch.Tensor]],
    expected: list[torch.Tensor],
    name: str,
    precision: str,
) -> None:
    """Prompts in chunks beside single tokens, all adapters and none in one batch."""
    model = model_with(base, adapters, precision, kernels if name == "native" else TORCH)
    assert model.fused_forward is not None
    off = [
        float((logits - reference).abs().max() / reference.abs().max())
        for logits, reference in compared(model, texts, list(adapters), expected)
    ]
    assert len(off) > 80
    # In bf16 a few rows of this model, whose attention is sharp, diverge.
    assert max(off) < 2e-4 if precision == "f32" else statistics.quantiles(off, n=10)[8] < 0.08


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "granite"])
def test_adapters_over_families_that_run_in_parts(kernels: LoraKernels, tmp_path: Path, family: str) -> None:
    folder = families.make(family, tmp_path / family).folder
    adapters = {
        "wide": lora_models.make_adapter(tmp_path / "wide", folder, Spec(5)),
        "narrow": lora_models.make_adapter(tmp_path / "narrow", folder, Spec(2, ATTENTION), seed=1),
    }
    rng = random.Random(4)
    texts = [(name, torch.tensor([rng.randrange(VOCAB) for _ in range(30)])) for name in (*adapters, None)]
    expected = peft_logits(folder, adapters, texts)
    without = peft_logits(folder, {}, [(None, tokens) for _, tokens in texts])
    assert all((one - other).abs().max() > 0.1 for one, other in zip(expected[:2], without[:2], strict=True))
    model = model_with(folder, adapters, "f32", kernels)
    assert model.fused_forward is None
    for logits, reference in compared(model, texts, list(adapters), expected):
        assert (logits - reference).abs().max() < 1e-4


@pytest.mark.parametrize("precision", few(("f32", "bf16"), ("f32",)))
@pytest.mark.parametrize("family", ["phi3", "gpt2", "gptj", "gpt_neox"])
def test_adapters_over_linears_that_are_stacked_or_ordered_otherwise(
    kernels: LoraKernels, tmp_path: Path, family: str, precision: str
) -> None:
    """As PEFT itself writes them for every linear, beside a DoRA and no adapter."""
    made = families.make(family, tmp_path / family)
    adapters = {
        name: lora_models.written_by_peft(tmp_path / name, made.folder, dora=name == "dora")
        for name in ("plain", "dora")
    }
    rng = random.Random(6)
    texts = [(name, torch.tensor([rng.randrange(VOCAB) for _ in range(30)])) for name in (*adapters, None)]
    expected = peft_logits(made.folder, adapters, texts)
    without = peft_logits(made.folder, {}, [(None, tokens) for _, tokens in texts])
    assert all((one - other).abs().max() > 0.1 for one, other in zip(expected[:2], without[:2], strict=True))
    model = model_with(made.folder, adapters, precision, kernels, has_magnitudes=lambda number: number == 1)
    off = [
        float((logits - reference).abs().max() / reference.abs().max())
        for logits, reference in compared(model, texts, list(adapters), expected)
    ]
    assert len(off) > 10
    assert max(off) < 2e-4 if precision == "f32" else statistics.median(off) < 0.08


# DoRA: magnitudes beside the factors.


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_dora_is_what_peft_computes(
    base: Path, kernels: LoraKernels, tmp_path: Path, family: str, precision: str
) -> None:
    """Beside a plain adapter and no adapter, in one batch."""
    under = base if family == "llama" else families.make(family, tmp_path / family).folder
    specs = {"dora": Spec(4, dora=True), "one_layer": Spec(3, layers=(1,), rslora=True, dora=True), "plain": Spec(4)}
    folders = {name: lora_models.make_adapter(tmp_path / name, under, spec) for name, spec in specs.items()}
    rng = random.Random(5)
    texts = [
        (name, torch.tensor([rng.randrange(VOCABULARY if family == "llama" else VOCAB) for _ in range(20)]))
        for name in [*folders, None]
    ]
    expected = peft_logits(under, folders, texts)
    model = model_with(under, folders, precision, kernels, has_magnitudes=lambda number: number < 2)
    off = [
        float((logits - reference).abs().max() / reference.abs().max())
        for logits, reference in compared(model, texts, list(folders), expected)
    ]
    assert len(off) > 30
    assert max(off) < 2e-4 if precision == "f32" else statistics.median(off) < 0.08


def test_magnitudes_that_do_not_fit_are_refused(base: Path, tmp_path: Path) -> None:
    folder = lora_models.make_adapter(tmp_path / "dora", base, Spec(2, dora=True))
    tensors = load_file(folder / peft.WEIGHTS)
    name = next(name for name in tensors if "magnitude" in name)
    model = peft.BaseModel.of_decoder(Architecture.read(base), {base.name}, 128, base)
    save_file({**tensors, name: torch.ones(3)}, folder / peft.WEIGHTS)
    with pytest.raises(InvalidInputError, match=r"lora_magnitude_vector: got \(3,\); shape must be"):
        peft.read(folder, model)
    save_file({**tensors, name: torch.full_like(tensors[name], float("nan"))}, folder / peft.WEIGHTS)
    with pytest.raises(InvalidInputError, match="lora_magnitude_vector: got 'NaN or infinity'"):
        peft.require_finite(peft.read(folder, model))
    with pytest.raises(InvalidInputError, match="lora_magnitude_vector: got .*; finite scales"):
        loaded(base, [folder], torch.float32)


def compared(
    model: DecodeModel, texts: list[tuple[str | None, torch.Tensor]], adapters: list[str], expected: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of `model` after tokens of the texts, computed in random steps, each with those of PEFT."""
    for batch in steps(texts, adapters):
        logits = model.forward(batch)
        for place, row in enumerate(batch.logit_rows):
            yield logits[place], expected[batch.slots[row]][batch.starts[row] + batch.lengths[row] - 1]


def steps(texts: list[tuple[str | None, torch.Tensor]], adapters: list[str]) -> Iterator[StepBatch]:
    """All texts in random steps, each in the slot of its number: some of them, some of their logits wanted."""
    rng = random.Random(1)
    done = [0] * len(texts)
    while live := [text for text, (_, tokens) in enumerate(texts) if done[text] < len(tokens)]:
        rows = rng.sample(live, rng.randint(1, len(live)))
        lengths = [min(len(texts[row][1]) - done[row], rng.choice((*[1] * 24, 7, 19))) for row in rows]
        owners = [-1 if (name := texts[row][0]) is None else adapters.index(name) for row in rows]
        yield StepBatch(
            tokens=torch.cat([texts[row][1][done[row] : done[row] + n] for row, n in zip(rows, lengths, strict=True)]),
            slots=torch.tensor(rows, dtype=torch.int32),
            starts=torch.tensor([done[row] for row in rows], dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            logit_rows=torch.tensor(sorted(rng.sample(range(len(rows)), max(0, len(rows) - rng.randint(0, 2))))).long(),
            adapters=torch.tensor(owners, dtype=torch.int32) if max(owners) >= 0 else None,
        )
        for row, length in zip(rows, lengths, strict=True):
            done[row] += length


@pytest.mark.parametrize(
    ("precision", "threads"), [("f32", 1), ("f32", 2), ("f32", 5), ("bf16", 2), ("int8", 2), ("int4", 2)]
)
def test_the_fused_forward_equals_its_parts(
    base: Path,
    adapters: dict[str, Path],
    kernels: LoraKernels,
    texts: list[tuple[str | None, torch.Tensor]],
    precision: str,
    threads: int,
) -> None:
    whole, parts = (model_with(base, adapters, precision, kernels) for _ in range(2))
    torch.set_num_threads(threads)
    assert whole.fused_forward is not None
    parts.fused_forward = None
    mixed = 0
    for batch in steps(texts, list(adapters)):
        logits = whole.forward(batch)
        # The separate operations round the logits as they round every result.
        rounded = logits if whole.memory.dtype == torch.float32 else logits.bfloat16().float()
        assert torch.equal(rounded, parts.forward(batch))
        mixed += batch.adapters is not None
    assert mixed > 20
    assert torch.equal(whole.memory, parts.memory)


@pytest.mark.parametrize(
    ("field", "changed", "says"),
    [
        ("places", lambda given: given[:, :1].contiguous(), "the model's linears"),
        ("places", lambda given: given + 10**9, "lies outside"),
        ("memory", lambda given: given.double(), "memory: must be contiguous Float"),
        ("all", lambda given: Groups(2, given.firsts, given.order + 1), "order: must be tokens"),
        ("last", lambda given: Groups(2, given.firsts.flip(0), given.order), "firsts: must"),
    ],
)
def test_invalid_low_rank_arrays_are_refused(
    base: Path,
    adapters: dict[str, Path],
    kernels: LoraKernels,
    field: str,
    changed: Callable[[Any], Any],
    says: str,
) -> None:
    model = model_with(base, adapters, "f32", kernels)
    hook = model.linear_hook

    class Wrong:
        """Gives the terms of the last step with one field changed."""

        def linear_delta(self, batch: StepBatch) -> Any:
            assert hook is not None
            self.right = hook.linear_delta(batch)
            return self

        def low_rank(self, last: torch.Tensor) -> LowRank:
            right = self.right.low_rank(last)
            assert right is not None
            return replace(right, **{field: changed(getattr(right, field))})

    model.linear_hook = Wrong()
    rows = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=says):
        model.forward(StepBatch(torch.tensor([5, 6]), rows, rows * 0, rows * 0 + 1, torch.tensor([0, 1]), rows))


def test_adapters_change_the_logits(
    adapters: dict[str, Path], texts: list[tuple[str | None, torch.Tensor]], expected: list[torch.Tensor], base: Path
) -> None:
    plain = peft_logits(base, adapters, [(None, tokens) for _, tokens in texts])
    for (name, _), one, other in zip(texts, expected, plain, strict=True):
        assert (name is None) == torch.equal(one, other)
        assert name is None or float((one - other).abs().max() / other.abs().max()) > 0.05


def test_a_model_without_adapters_refuses_them(base: Path) -> None:
    model = DecodeModel.load(
        base, ModelOptions(precision="f32", slots=1, max_length=8, threads=1, cache_dir=KERNELS), lambda text: None
    )
    one = torch.tensor([0], dtype=torch.int32)
    batch = StepBatch(torch.tensor([5]), one, one, one + 1, torch.tensor([0]), one)
    with pytest.raises(InvalidInputError, match="adapters"):
        model.forward(batch)
