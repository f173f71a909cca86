"""The step that CUDA graphs capture, run on a CPU: its shapes depend on bounds alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from shapeshift.fused_decode.model.graphs.bounds import GraphBounds, bounds_of
from shapeshift.fused_decode.model.torch_operations import StepKernels
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from tests.fused_decode import families
from tests.fused_decode.decode_models import FAMILIES, LONGEST, Tiny, batch, teacher_forced, texts

TOLERANCE = 2e-4
SLOTS = 6


def open_model(
    tiny: Tiny, device: str = "cpu", precision: str = "f32", kernels: StepKernels | None = None
) -> GraphedModel:
    torch.set_num_threads(1)
    return GraphedModel.load_on(
        device, tiny.folder, precision=precision, slots=SLOTS, max_length=LONGEST, kernels=kernels
    )


def reference(tiny: Tiny, given: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [tiny.reference(tokens[None]).logits[0] for tokens in given]


@pytest.mark.parametrize("family", FAMILIES)
def test_single_tokens_over_slots(tiny: Callable[[str], Tiny], family: str) -> None:
    model, given, rng = open_model(tiny(family)), texts(4, seed=8, shortest=72), random.Random(9)
    expected, slots, done = reference(tiny(family), given), [3, 0, 1, 5], [40, 3, 17, 66]
    model.forward(batch([text[:count] for text, count in zip(given, done, strict=True)], slots, [0] * 4))
    for _ in range(12):
        rows = sorted(rng.sample([row for row in range(4) if done[row] < len(given[row])], 2))
        pieces = [given[row][done[row] : done[row] + 1] for row in rows]
        logits = model.forward(batch(pieces, [slots[row] for row in rows], [done[row] for row in rows], [1]))
        last = rows[1]
        assert logits.shape == (1, model.vocab_size)
        assert (logits[0] - expected[last][done[last]]).abs().max() < TOLERANCE
        for row in rows:
            done[row] += 1
    assert {bounds.context for bounds in model.graphs} == {64, LONGEST}
    assert set(model.graphs) == {GraphBounds(2, context) for context in (64, LONGEST)}


@pytest.mark.parametrize("case", ["gemma2", "gpt2", "gpt_neox", "phi3"])
def test_families_with_other_layers(tmp_path: Path, case: str) -> None:
    """Also texts that join and leave, with rotary tables of their own."""
    tiny = families.make(case, tmp_path)
    model, given = open_model(tiny), texts(4, seed=1)
    expected = [families.reference_logits(tiny, tokens) for tokens in given]
    for text, place, logits in teacher_forced(model, given, [2, 0, 3, 1], seed=14):
        assert (logits - expected[text][place]).abs().max() < TOLERANCE
    assert model.graphs, "no step was one of single tokens"


def test_mixed_steps(tiny: Callable[[str], Tiny]) -> None:
    model, given = open_model(tiny("qwen3")), texts(SLOTS, seed=10)
    expected = reference(tiny("qwen3"), given)
    seen = 0
    for text, place, logits in teacher_forced(model, given, [4, 0, 5, 2, 3, 1], seed=11):
        assert (logits - expected[text][place]).abs().max() < TOLERANCE
        seen += 1
    assert seen > 50


def beside_chunks(
    model: GraphedModel, given: list[torch.Tensor], slots: list[int], seed: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Feed all texts as the loop does: a chunk of a prompt behind the rows that decode. Yields as `teacher_forced`."""
    rng, done, waiting = random.Random(seed), [0] * len(given), list(range(len(given)))
    while True:
        rows = [row for row, text in enumerate(given) if row not in waiting and done[row] < len(text)]
        pieces = [given[row][done[row] : done[row] + 1] for row in rows]
        if waiting:
            rows.append(waiting[0])
            pieces.append(given[rows[-1]][done[rows[-1]] :][: rng.randint(2, 30)])
        if not rows:
            return
        wanted = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
        logits = model.forward(batch(pieces, [slots[row] for row in rows], [done[row] for row in rows], wanted))
        for row, piece in zip(rows, pieces, strict=True):
            done[row] += len(piece)
        if waiting and done[waiting[0]] > 15:
            waiting.pop(0)
        yield from ((rows[row], done[rows[row]] - 1, logits[place]) for place, row in enumerate(wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_of_a_prompt_beside_single_tokens(tiny: Callable[[str], Tiny], family: str) -> None:
    model, given = open_model(tiny(family)), texts(SLOTS, seed=15)
    # What was there before must not matter.
    model.memory.fill_(float("nan"))
    expected = reference(tiny(family), given)
    for text, place, logits in beside_chunks(model, given, [4, 0, 5, 2, 3, 1], seed=16):
        assert (logits - expected[text][place]).abs().max() < TOLERANCE
    assert {(bounds.rows, bounds.chunk) for bounds in model.graphs if bounds.chunk} == {(8, 64)}


@pytest.mark.parametrize(("precision", "error"), [("f16", 0.005), ("bf16", 0.04)])
def test_16_bits(tiny: Callable[[str], Tiny], precision: str, error: float) -> None:
    """Largest error, as a share of the largest logit: f16 has three bits more than bf16."""
    model, given = open_model(tiny("llama"), precision=precision), texts(4, seed=12)
    expected = reference(tiny("llama"), given)
    found = [
        float((logits.float() - expected[text][place]).abs().max() / expected[text].abs().max())
        for text, place, logits in teacher_forced(model, given, [2, 0, 3, 1], seed=13)
    ]
    assert max(found) < error


def test_with_and_without_graphs(tiny: Callable[[str], Tiny]) -> None:
    model, (text, other) = open_model(tiny("llama")), texts(2, seed=17)
    step = batch([text[:1], other[:20]], [1, 3], [0, 0])
    graph = model.forward(step).clone()
    assert len(model.graphs) == 1
    model.uses_graphs = False
    torch.testing.assert_close(graph, model.forward(step), atol=TOLERANCE, rtol=0)
    assert len(model.graphs) == 1


@pytest.mark.parametrize("uses_graphs", [True, False])
def test_a_loop_that_launches_ahead_gives_the_tokens_of_one_that_waits(
    tiny: Callable[[str], Tiny], uses_graphs: bool
) -> None:
    """Requests join and leave, and steps are mixed; all tokens are chosen as on a device."""
    found = []
    for ahead in (False, True):
        model, rng = open_model(tiny("qwen3")), random.Random(20)
        model.uses_graphs = uses_graphs
        model.memory.fill_(float("nan"))
        fed = launches(model)
        if not ahead:
            model.feed = None
        found.append(generate(model, rng))
        assert (len(fed) > 20) == ahead
    assert found[0] == found[1] and len({tuple(one) for one in found[0]}) > 10


def launches(model: GraphedModel) -> list[StepBatch]:
    """The steps whose tokens are not all known when they are given, as they come."""
    found, forward = [], model.forward

    def noted(batch: StepBatch) -> torch.Tensor:
        given = batch
        if given.fed is not None:
            found.append(given)
            # What stands in their place does not matter.
            given = dataclasses.replace(given, tokens=given.tokens.masked_fill(given.fed, 0))
        return forward(given)

    model.forward = noted  # type: ignore[method-assign]
    return found


def generate(model: GraphedModel, rng: random.Random) -> list[list[int]]:
    """The tokens of random requests, most of them sampled, that a loop answers together."""
    admission: FirstComeFirstServed[Request] = FirstComeFirstServed(1000)
    pool = BlockPool(model.blocks, caching=True)
    loop = DecodeLoop(model, admission, lambda requests: None, print, pool=pool, prefill_tokens=64)
    table, made = [b"?"] * model.vocab_size, []
    for number in range(16):
        prompt = np.array([rng.randrange(9, 60) for _ in range(rng.randint(1, 40))])
        params = SamplingParams(temperature=number % 3 * 0.5, seed=number, max_tokens=rng.randint(1, 20))
        made.append(Request(str(number), prompt, params, TextStream(table, ()), max_length=model.max_length))
        loop.submit(made[-1])
        for _ in range(rng.randint(0, 3)):
            loop.step()
            loop.check_integrity()
    while loop.step():
        loop.check_integrity()
    assert all(request.is_finished and request.error is None for request in made)
    return [request.token_ids for request in made]


def test_few_bounds_for_many_steps() -> None:
    def bounds(lengths: list[int], start: int = 0, **changed: Any) -> GraphBounds | None:
        rows = len(lengths)
        step = batch([torch.zeros(length, dtype=torch.int64) for length in lengths], [0] * rows, [start] * rows)
        return bounds_of(dataclasses.replace(step, **changed), slots=40, longest=1024)

    assert bounds([1]) == GraphBounds(1, 64) and bounds([1] * 5, 64) == GraphBounds(8, 128)
    assert bounds([1] * 33, 1023) == GraphBounds(40, 1024)
    assert bounds([2]) == GraphBounds(8, 64, 64) and bounds([1] * 8 + [64], 1) == GraphBounds(8, 128, 64)
    assert bounds([1] * 9 + [65]) == GraphBounds(32, 128, 128) and bounds([256]) == GraphBounds(8, 256, 256)
    assert bounds([1] * 33 + [129]) == GraphBounds(40, 256, 256)
    assert bounds([257]) is bounds([2, 1]) is bounds([2, 2]) is None
    one = torch.zeros(1, dtype=torch.int64)
    assert bounds([1], further=one) is bounds([1], adapters=one) is None


def test_a_mixed_step_writes_only_into_the_blocks_of_its_rows(tiny: Callable[[str], Tiny]) -> None:
    model, (text, other) = open_model(tiny("qwen3")), texts(2, seed=18)
    slots = model.memory.view(SLOTS, -1)
    slots.fill_(float("nan"))
    model.forward(batch([text[:1], other[:9]], [4, 1], [0, 0]))
    assert [int(slot) for slot in (~slots.isnan()).any(dim=1).nonzero()] == [1, 4]
    tokens = [int((~own.isnan()).sum()) // (model.block_elements // BLOCK_TOKENS) for own in slots[[4, 1]]]
    assert tokens == [1, 9], "the tokens that fill a chunk are those of the text"


def test_a_step_writes_only_into_the_blocks_of_its_rows(tiny: Callable[[str], Tiny]) -> None:
    """The others may hold adapters, and their memory is filled while a step runs."""
    model = open_model(tiny("qwen3"))
    slots = model.memory.view(SLOTS, -1)
    slots.fill_(float("nan"))
    (text,) = texts(1, seed=12)
    model.forward(batch([text[:5]], [4], [0]))
    before = model.memory.clone().view(SLOTS, -1)
    for place in range(5, 9):
        logits = model.forward(batch([text[place : place + 1]], [4], [place]))
        expected = reference(tiny("qwen3"), [text[: place + 1]])[0][place]
        assert (logits[0] - expected).abs().max() < TOLERANCE
    others = [slot for slot in range(SLOTS) if slot != 4]
    assert slots[others].isnan().all()
    assert not torch.equal(slots[4].nan_to_num(), before[4].nan_to_num())


def test_what_a_slot_held_before_does_not_matter(tiny: Callable[[str], Tiny]) -> None:
    """An adapter with NaN that was refused, or the keys of a request whose logits were not finite."""
    model, (text,) = open_model(tiny("qwen3")), texts(1, seed=13)
    model.memory.fill_(float("nan"))
    expected = reference(tiny("qwen3"), [text])[0]
    first = model.forward(batch([text[:1]], [2], [0]))
    assert (first[0] - expected[0]).abs().max() < TOLERANCE, "a prompt of one token"
    model.forward(batch([text[:5]], [4], [0]))
    for place in range(5, 9):
        logits = model.forward(batch([text[place : place + 1]], [4], [place]))
        assert (logits[0] - expected[place]).abs().max() < TOLERANCE


def test_a_missing_device_is_refused(tiny: Callable[[str], Tiny]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UnsupportedError, match="GPU 0: this machine has no NVIDIA driver"):
        GraphedModel.load_on("cuda:0", tiny("llama").folder, slots=1, max_length=8)


# What only a GPU can show: these steps are captured, and replayed.


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps(tiny: Callable[[str], Tiny], family: str) -> None:
    model, given = open_model(tiny(family), "cuda:0"), texts(SLOTS, seed=15)
    model.memory.fill_(float("nan"))
    expected = reference(tiny(family), given)
    for text, place, logits in beside_chunks(model, given, [4, 0, 5, 2, 3, 1], seed=16):
        assert (logits.cpu() - expected[text][place]).abs().max() < TOLERANCE


@pytest.mark.gpu
def test_captured_steps_of_two_models_and_after_a_reload(tiny: Callable[[str], Tiny]) -> None:
    given = texts(2, seed=19)
    expected = reference(tiny("llama"), given)
    models = [open_model(tiny("llama"), "cuda:0") for _ in range(2)]
    for turn in range(4):
        if turn == 2:
            models[0] = open_model(tiny("llama"), "cuda:0")
        for model, text, own in zip(models, given, expected, strict=True):
            logits = model.forward(batch([text[:20]], [turn], [0]))
            assert (logits.cpu()[0] - own[19]).abs().max() < TOLERANCE
