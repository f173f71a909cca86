"""The forward pass against transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.engine.sampling.logit_edits import TokenRules
from shapeshift.fused_decode.engine.sampling.sampler import Sampler, SamplingTable
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, Groups
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.fused_decode.settings import COMPUTED_BYTES, KV_PRECISIONS, MOST_DRAFTED, ON_CPU
from tests.fused_decode.decode_models import FAMILIES, LONGEST, VOCAB, Tiny, batch, make, teacher_forced, texts
from tests.sampling import few

LOGITS_TOLERANCE = 2e-4
BF16_TOLERANCE = 0.05
INT8_TOLERANCE = 0.2
SLOTS = 6
# Precision and kv_precision.
PRECISIONS = [*((precision, "auto") for precision in ON_CPU), ("f32", "int8"), ("bf16", "int8")]
UNQUANTISED = [(precision, kept) for precision, kept in PRECISIONS if precision in COMPUTED_BYTES]


@pytest.fixture
def load(kernel_cache: Path) -> Callable[..., DecodeModel]:
    def run(
        folder: Path, precision: str = "f32", native: bool = True, kv_precision: str = "auto", **others: int
    ) -> DecodeModel:
        return DecodeModel.load(
            folder,
            ModelOptions(
                precision=precision,
                kv_precision=kv_precision,
                slots=SLOTS,
                max_length=others.get("max_length", LONGEST),
                threads=others.get("threads", 1),
                native=native,
                cache_dir=kernel_cache,
            ),
            lambda line: None,
        )

    return run


def reference_logits(tiny: Tiny, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = tiny.reference(tokens[None]).logits[0]
    return logits


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], family: str, native: bool
) -> None:
    model = load(tiny(family).folder, native=native, threads=2 if family == "llama" else 1)
    assert model.operations.name == ("native" if native else "torch")
    given = texts(SLOTS, seed=1)
    expected = [reference_logits(tiny(family), tokens) for tokens in given]
    seen = 0
    for text, place, logits in teacher_forced(model, given, [4, 0, 5, 2, 3, 1], seed=2):
        assert (logits - expected[text][place]).abs().max() < LOGITS_TOLERANCE
        seen += 1
    assert seen > 50


@pytest.mark.parametrize(("precision", "kept"), PRECISIONS)
@pytest.mark.parametrize("threads", few((1, 2, 5), (2,)))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fused_forward_equals_the_separate_operations(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], family: str, threads: int, precision: str, kept: str
) -> None:
    whole, parts = (load(tiny(family).folder, precision, threads=threads, kv_precision=kept) for _ in range(2))
    assert whole.fused_forward is not None
    parts.fused_forward = None
    given, slots = texts(SLOTS, seed=8), [4, 0, 5, 2, 3, 1]
    fed = (teacher_forced(model, given, slots, seed=9) for model in (whole, parts))
    for (text, place, logits), (*other, expected) in zip(*fed, strict=True):
        assert [text, place] == other
        # The separate operations round the logits as they round every result.
        assert torch.equal(logits if whole.memory.dtype == torch.float32 else logits.bfloat16().float(), expected)
    assert torch.equal(whole.memory.view(torch.uint8), parts.memory.view(torch.uint8))


def test_tokens_that_are_chosen_with_a_step_are_those_that_its_logits_give(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel]
) -> None:
    model = load(tiny("llama").folder, threads=2)
    table = SamplingTable(SLOTS, np.zeros((SLOTS, LONGEST + 1), np.int32))
    biased = TokenRules(tokens=np.array([3]), biases=np.array([50.0], np.float32))
    choosing: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 9},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 3.0},
    ]
    for slot, params in enumerate([*choosing, {"logprobs": 2}]):
        table.set(slot, SamplingParams(seed=slot, **params), rules=biased if slot == 1 else None)
    given, slots, chosen = texts(SLOTS, seed=3, shortest=LONGEST), [4, 0, 5, 2, 3, 1], set()
    for start in range(LONGEST - 1):
        step = batch([text[start : start + 1] for text in given], slots, [start] * SLOTS)
        logits = model.forward(dataclasses.replace(step, draws=table.draws))
        assert table.draws.is_done
        rows = np.array(slots), np.full(SLOTS, start + 1)
        together = Sampler(table).choose(logits.clone(), *rows, is_plain=True).result()
        apart = Sampler(table).choose(logits, *rows).result()
        assert (together.ids == apart.ids).all() and together.finite.all()
        assert together.ids[slots.index(1)] == 3 and together.logprobs[2].rank == apart.logprobs[2].rank
        chosen |= {*together.ids.tolist()}
    assert len(chosen) > 10


@pytest.mark.parametrize(("precision", "kept"), PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_the_other_rows(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], family: str, precision: str, kept: str
) -> None:
    alone, beside = (load(tiny(family).folder, precision, threads=2, kv_precision=kept) for _ in range(2))
    text, *others = texts(5, seed=10, shortest=40)
    slots = [3, 0, 5, 1, 2]
    for start, end in [(0, 20), *((place, place + 1) for place in range(20, 30))]:
        pieces = [text[start:end], *(other[start:end] for other in others)]
        expected = alone.forward(batch(pieces[:1], slots[:1], [start]))
        assert torch.equal(beside.forward(batch(pieces[::-1], slots[::-1], [start] * 5))[-1:], expected)


@pytest.mark.parametrize("fused", [True, False], ids=["one operation", "kernel by kernel"])
@pytest.mark.parametrize(("precision", "kept"), UNQUANTISED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_tokens_at_once_get_the_results_that_they_get_one_by_one(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], family: str, precision: str, kept: str, fused: bool
) -> None:
    """So a proposed token that is verified is the one that the model would have chosen."""
    single, several = (load(tiny(family).folder, precision, threads=2, kv_precision=kept) for _ in range(2))
    if not fused:
        single.fused_forward = several.fused_forward = None
    given, slots = texts(2, seed=20, shortest=80), [3, 1]
    for model in (single, several):
        model.forward(batch([text[:13] for text in given], slots, [0, 0]))
    start = 13
    for count in (2, 9, 1 + MOST_DRAFTED, 5):
        end = start + count
        expected = [
            single.forward(batch([text[at : at + 1] for text in given], slots, [at] * 2)).clone()
            for at in range(start, end)
        ]
        step = batch([text[start:end] for text in given], slots, [start] * 2, wanted=[])
        found = several.forward(dataclasses.replace(step, further=torch.arange(2 * count)))
        assert torch.equal(found.view(2, count, VOCAB), torch.stack(expected, 1))
        start = end
    assert torch.equal(single.memory.view(torch.uint8), several.memory.view(torch.uint8))


@pytest.mark.parametrize("native", few((True, False), (True,)))
@pytest.mark.parametrize(("precision", "kept"), UNQUANTISED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_does_not_depend_on_the_places_of_its_blocks(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], family: str, precision: str, kept: str, native: bool
) -> None:
    plain, scattered = (load(tiny(family).folder, precision, native, kept) for _ in range(2))
    scattered.cache.memory.fill_(float("nan"))
    given, slots = texts(3, seed=11, shortest=60), [1, 4, 2]
    numbers = torch.randperm(plain.cache.blocks, generator=torch.Generator().manual_seed(12)).int()
    numbers = numbers[: 3 * plain.cache.text_blocks].view(3, -1)
    for start, end in [(0, 19), (19, 50), *((place, place + 1) for place in range(50, 60))]:
        step = batch([text[start:end] for text in given], slots, [start] * 3)
        expected = plain.forward(step).clone()
        held = numbers[:, : -(-end // BLOCK_TOKENS)].contiguous()
        assert torch.equal(scattered.forward(dataclasses.replace(step, blocks=held)), expected)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([[0]], "starts [+] lengths: got .*at most what the blocks hold"),
        ([[0, 36]], "blocks: got"),
        ([[0, -1]], "blocks"),
    ],
)
def test_blocks_outside_the_cache_are_refused(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], blocks: list[list[int]], message: str
) -> None:
    model = load(tiny("llama").folder)
    step = batch([torch.ones(BLOCK_TOKENS + 1, dtype=torch.int64)], [0], [0])
    with pytest.raises(InvalidInputError, match=message):
        model.forward(dataclasses.replace(step, blocks=torch.tensor(blocks, dtype=torch.int32)))


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_without_native_linears_there_is_no_fused_forward(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], precision: str
) -> None:
    assert load(tiny("llama").folder, precision, native=False).fused_forward is None


def test_tokens_beyond_the_vocabulary_are_refused(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel]
) -> None:
    model = load(tiny("llama").folder)
    for token in (-1, VOCAB):
        with pytest.raises(RuntimeError, match=f"tokens: must be 0 to {VOCAB - 1}"):
            model.forward(batch([torch.tensor([1, token])], [0], [0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], family: str
) -> None:
    model, new = load(tiny(family).folder), 24
    prompts = [tokens[:20] for tokens in texts(3, seed=3)]
    starts, slots = [0, 0, 0], [5, 1, 2]
    pieces, answers = prompts, [[], [], []]  # type: ignore[var-annotated]
    for _ in range(new):
        logits = model.forward(batch(pieces, slots, starts))
        starts = [start + len(piece) for start, piece in zip(starts, pieces, strict=True)]
        pieces = list(logits.argmax(dim=1, keepdim=True))
        for answer, piece in zip(answers, pieces, strict=True):
            answer.append(int(piece))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = tiny(family).reference.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bf16_stays_close(tmp_path: Path, load: Callable[..., DecodeModel], family: str, native: bool) -> None:
    small = make(family, tmp_path, spread=0.05)
    given = texts(SLOTS, seed=4)
    expected = [reference_logits(small, tokens).log_softmax(dim=-1) for tokens in given]
    assert max(float(table.std()) for table in expected) > 0.3
    model, worst = load(tmp_path, "bf16", native), 0.0
    for text, place, logits in teacher_forced(model, given, list(range(SLOTS)), seed=5):
        worst = max(worst, float((logits.log_softmax(dim=-1) - expected[text][place]).abs().max()))
    assert 0.0 < worst <= BF16_TOLERANCE


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_cache_in_int8_stays_close(
    tmp_path: Path, load: Callable[..., DecodeModel], family: str, native: bool
) -> None:
    small = make(family, tmp_path, spread=0.05)
    given = texts(SLOTS, seed=4)
    expected = [reference_logits(small, tokens).log_softmax(dim=-1) for tokens in given]
    model, worst = load(tmp_path, "f32", native, "int8"), 0.0
    for text, place, logits in teacher_forced(model, given, list(range(SLOTS)), seed=5):
        worst = max(worst, float((logits.log_softmax(dim=-1) - expected[text][place]).abs().max()))
    assert LOGITS_TOLERANCE < worst <= INT8_TOLERANCE


@pytest.mark.parametrize("kept", KV_PRECISIONS)
def test_a_copied_block_holds_the_same_text(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], kept: str
) -> None:
    model = load(tiny("llama").folder, kv_precision=kept)
    text = texts(1, seed=13, shortest=40)[0]
    blocks = torch.tensor([[5, 2, 9]], dtype=torch.int32)
    model.forward(dataclasses.replace(batch([text[:39]], [0], [0]), blocks=blocks))
    model.copy_blocks([5, 2, 9], [20, 30, 21])
    copied = torch.tensor([[20, 30, 21]], dtype=torch.int32)
    step = batch([text[39:40]], [0], [39])
    found = [model.forward(dataclasses.replace(step, blocks=own)).clone() for own in (copied, blocks)]
    assert torch.equal(*found)


def test_a_value_that_is_no_number_reaches_its_own_row_alone(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel]
) -> None:
    model = load(tiny("llama").folder, kv_precision="int8")
    given = texts(2, seed=14, shortest=30)
    model.forward(batch([text[:20] for text in given], [0, 1], [0, 0]))
    model.cache.value_scales[0][0, 0, 3] = float("nan")
    logits = model.forward(batch([text[20:21] for text in given], [0, 1], [20, 20]))
    assert logits[0].isnan().all() and logits[1].isfinite().all()


def test_a_slot_can_be_reused(tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel]) -> None:
    model = load(tiny("llama").folder)
    model.memory.fill_(float("nan"))
    long, short = texts(2, seed=6, shortest=LONGEST)
    model.forward(batch([long], [3], [0]))
    logits = model.forward(batch([short[:30]], [3], [0]))
    assert (logits[0] - reference_logits(tiny("llama"), short[:30])[-1]).abs().max() < LOGITS_TOLERANCE


def test_torch_operations_ignore_foreign_tokens(tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel]) -> None:
    model = load(tiny("mistral").folder, native=False)
    model.memory.fill_(float("nan"))
    given = texts(2, seed=7)
    logits = model.forward(batch([given[0][:19], given[1][:19]], [0, 1], [0, 0]))
    assert (logits[1] - reference_logits(tiny("mistral"), given[1][:19])[-1]).abs().max() < LOGITS_TOLERANCE
    model.forward(batch([given[1][:4]], [2], [0]))
    logits = model.forward(batch([given[0][19:20], given[1][4:5]], [0, 2], [19, 4]))
    assert (logits[1] - reference_logits(tiny("mistral"), given[1][:5])[-1]).abs().max() < LOGITS_TOLERANCE


def test_the_properties_of_a_runtime(tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel]) -> None:
    model = load(tiny("llama").folder)
    assert (model.vocab_size, model.slots, model.max_length, model.eos_ids) == (VOCAB, SLOTS, LONGEST, {2})
    assert model.forward(batch([torch.tensor([1, 2])], [0], [0], wanted=[])).shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("slots", "starts", "field"),
    [([SLOTS], [0], "slots"), ([-1], [0], "slots"), ([0, 0], [0, 0], "slots"), ([0], [-1], "starts")],
)
def test_rows_beyond_the_cache_are_refused(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], slots: list[int], starts: list[int], field: str
) -> None:
    model = load(tiny("llama").folder)
    with pytest.raises(InvalidInputError, match=f"^{field}: got "):
        model.forward(batch([torch.tensor([1])] * len(slots), slots, starts))


def test_texts_beyond_a_slot_are_refused(tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel]) -> None:
    model = load(tiny("llama").folder)
    with pytest.raises(InvalidInputError, match=rf"at most max_length \({LONGEST}\)"):
        model.forward(batch([torch.tensor([1, 1])], [0], [LONGEST - 1]))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"precision": "f16"}, "precision"),
        ({"kv_precision": "u8"}, "kv_precision"),
        ({"max_length": 257}, "max_length"),
    ],
)
def test_invalid_settings_are_refused(
    tiny: Callable[[str], Tiny], load: Callable[..., DecodeModel], changes: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: got "):
        load(tiny("llama").folder, **changes)


def test_groups_name_their_tokens() -> None:
    groups = Groups(6, *(torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 2, 4], [2, 4, 0, 3])))
    assert [tokens.tolist() for tokens in groups.each()] == [[2, 4], [], [0, 3]]
    assert all(tokens.dtype == torch.int64 for tokens in groups.each())
