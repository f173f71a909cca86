"""Steps with adapters as CUDA graphs have them, run on a CPU: their shapes depend on bounds alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shapeshift.adapter_cache.lora import grouped, grouped_loading
from shapeshift.adapter_cache.lora.batch import LoraHook, shifted
from shapeshift.adapter_cache.lora.grouped import AddTerms, GraphLoraHook, GroupedLora
from shapeshift.adapter_cache.lora.segmented import TorchLora
from shapeshift.adapter_cache.memory.adapter_table import make_adapter
from shapeshift.adapter_cache.memory.loader import load_weights
from shapeshift.adapter_cache.registry import peft, store
from shapeshift.fused_decode.interfaces import DOWN, GATE_UP, OUTPUT, QKV, StepBatch
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from tests.fused_decode.checkpoints import VOCABULARY

SLOTS, LONGEST = 8, 96
TOLERANCE = 2e-4


class Held:
    """Adapters that lie in the first half of a buffer and may move to the second; by number."""

    def __init__(self, base: Path, folders: list[Path]) -> None:
        architecture = Architecture.read(base)
        model = peft.BaseModel.of_decoder(architecture, {base.name}, 128, base)
        made = [make_adapter(one.name, store.digest(one), peft.read(one, model), 4) for one in folders]
        self._half = -(-(64 + sum(one.elements + 64 for one in made)) // 32) * 32
        self.memory = torch.full((2 * self._half,), float("nan"))
        self.version, self.places, start = 0, list[torch.Tensor](), 64
        self._spans: list[slice] = []
        for one in made:
            load_weights(self.memory[start : start + one.elements], one, TorchLora().store)
            self.places.append(shifted(one.relative, start))
            self._spans.append(slice(start, start + one.elements))
            start += -(-(one.elements + 32) // 32) * 32

    def move(self, number: int) -> None:
        span = self._spans[number]
        self.memory[span.start + self._half : span.stop + self._half] = self.memory[span]
        self.memory[span] = float("nan")
        self.places[number] = shifted(self.places[number], self._half)
        self.version += 1

    def places_of(self, numbers: list[int]) -> tuple[list[torch.Tensor], int]:
        return [self.places[number] for number in numbers], self.version


@pytest.fixture(scope="module")
def held(small_base: Path, mixed_adapters: dict[str, Path]) -> Held:
    return Held(small_base, list(mixed_adapters.values()))


def model_over(base: Path) -> GraphedModel:
    torch.set_num_threads(1)
    return GraphedModel.load_on("cpu", base, precision="f32", slots=SLOTS, max_length=LONGEST)


def graphed(
    base: Path,
    held: Held,
    add: AddTerms = grouped.add_terms,
    has_magnitudes: Callable[[int], bool] = lambda number: False,
) -> GraphedModel:
    """A model that must not compute a step without a graph."""
    model = model_over(base)
    layers = model.architecture.layers
    kernels = GroupedLora(add, "grouped", 64)
    model.linear_hook = GraphLoraHook(held.memory, held.places_of, kernels, has_magnitudes, slots=SLOTS, layers=layers)

    def refuse(batch: StepBatch) -> torch.Tensor:
        raise AssertionError("a step has no graph")

    model._run_eagerly = refuse  # type: ignore[method-assign]
    return model


def plain(base: Path, held: Held) -> GraphedModel:
    model = model_over(base)
    model.uses_graphs = False
    model.linear_hook = LoraHook(held.memory, held.places_of, TorchLora())
    return model


def mixed_steps(adapters: int, seed: int, texts: int = 6) -> Iterator[StepBatch]:
    """Texts that join one after the other, with chunks beside single tokens; each third one has no adapter."""
    rng = random.Random(seed)
    owners = [-1 if text % 3 == 2 else rng.randrange(adapters) for text in range(texts)]
    given = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 60))] for _ in range(texts)]
    slots = rng.sample(range(SLOTS), texts)
    done, waiting = [0] * texts, list(range(texts))
    while waiting or any(0 < done[text] < len(given[text]) for text in range(texts)):
        rows = [text for text in range(texts) if text not in waiting and done[text] < len(given[text])]
        lengths = [1] * len(rows)
        if waiting and (not rows or rng.random() < 0.4):
            rows.append(waiting.pop(0))
            lengths.append(rng.randint(2, 18))
        wanted = torch.tensor(sorted(rng.sample(range(len(rows)), rng.randint(0, len(rows)))), dtype=torch.int64)
        pieces = [given[row][done[row] : done[row] + length] for row, length in zip(rows, lengths, strict=True)]
        own = torch.tensor([owners[row] for row in rows], dtype=torch.int32)
        yield StepBatch(
            tokens=torch.tensor([token for piece in pieces for token in piece]),
            slots=torch.tensor([slots[row] for row in rows], dtype=torch.int32),
            starts=torch.tensor([done[row] for row in rows], dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            logit_rows=wanted,
            adapters=own if int(own.max()) >= 0 else None,
        )
        for row, length in zip(rows, lengths, strict=True):
            done[row] += length


@pytest.mark.parametrize("seed", range(3))
def test_graphs_give_what_each_adapter_gives_alone(small_base: Path, held: Held, seed: int) -> None:
    model, reference = graphed(small_base, held), plain(small_base, held)
    model.memory.fill_(float("nan"))
    rows = 0
    for step in mixed_steps(len(held.places), seed):
        found, expected = model.forward(step), reference.forward(step)
        assert found.shape == expected.shape
        if len(found):
            assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
        rows += len(found)
    assert rows > 60
    kinds = {(bool(bounds.chunk), bool(bounds.linears)) for bounds in model.graphs}
    assert kinds >= {(False, True), (True, True)}


def test_one_graph_serves_all_adapters_wherever_they_lie(small_base: Path, mixed_adapters: dict[str, Path]) -> None:
    """Of which linears they have terms is all that a graph is made for."""
    held = Held(small_base, [mixed_adapters["small"], mixed_adapters["large"]])
    model, reference = graphed(small_base, held), plain(small_base, held)

    def logits(adapters: list[int]) -> list[torch.Tensor]:
        one = torch.ones(len(adapters), dtype=torch.int32)
        slots = torch.arange(len(adapters), dtype=torch.int32)
        tokens, owners = torch.arange(len(adapters)) + 9, torch.tensor(adapters, dtype=torch.int32)
        step = StepBatch(tokens, slots, one * 0, one, slots.long(), adapters=owners)
        return [with_them.forward(step).clone() for with_them in (model, reference)]

    for adapters in ([0, 1, 0], [1, 1, -1], [0, 0, 0], [-1, 1, 0]):
        found, expected = logits(adapters)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    before, _ = logits([0, 1, 0])
    held.move(0)
    after, _ = logits([0, 1, 0])
    assert torch.equal(before, after) and len(model.graphs) == 1


def test_graphs_are_made_for_the_linears_that_have_terms(small_base: Path, mixed_adapters: dict[str, Path]) -> None:
    names = ["attention", "mlp", "small"]
    held = Held(small_base, [mixed_adapters[name] for name in names])
    model = graphed(small_base, held)
    for number in range(3):
        one, own = torch.ones(1, dtype=torch.int32), torch.tensor([number], dtype=torch.int32)
        model.forward(StepBatch(torch.tensor([9]), one * 0, one * 0, one, torch.zeros(1).long(), adapters=own))
    attention, mlp = 1 << QKV | 1 << OUTPUT, 1 << GATE_UP | 1 << DOWN
    assert [bounds.linears for bounds in model.graphs] == [attention, mlp, attention | mlp]


def test_a_dora_has_no_graph(small_base: Path, held: Held) -> None:
    model, ran = graphed(small_base, held, has_magnitudes=lambda number: number == 1), list[StepBatch]()

    def eagerly(batch: StepBatch) -> torch.Tensor:
        ran.append(batch)
        return torch.zeros(1, 1)

    model._run_eagerly = eagerly  # type: ignore[method-assign]
    one = torch.ones(2, dtype=torch.int32)
    slots = torch.arange(2, dtype=torch.int32)
    step = StepBatch(torch.tensor([9, 9]), slots, one * 0, one, torch.zeros(1).long(), adapters=slots)
    model.forward(step)
    assert len(ran) == 1
    model.forward(replace(step, adapters=torch.tensor([0, -1], dtype=torch.int32)))
    assert len(ran) == 1 and len(model.graphs) == 1


def test_a_step_writes_only_into_the_blocks_of_its_rows(small_base: Path, held: Held) -> None:
    """What fills the rows repeats one of them, with its adapter."""
    model = graphed(small_base, held)
    slots = model.memory.view(SLOTS, -1)
    slots.fill_(float("nan"))
    one = torch.ones(3, dtype=torch.int32)
    rows = torch.tensor([4, 1, 6], dtype=torch.int32)
    lengths = torch.tensor([1, 1, 9], dtype=torch.int32)
    own = torch.tensor([0, -1, 5], dtype=torch.int32)
    model.forward(StepBatch(torch.arange(11) + 9, rows, one * 0, lengths, torch.arange(3), adapters=own))
    assert [int(slot) for slot in (~slots.isnan()).any(dim=1).nonzero()] == [1, 4, 6]
    tokens = [int((~own.isnan()).sum()) // (model.block_elements // 16) for own in slots[[4, 1, 6]]]
    assert tokens == [1, 1, 9]


def test_the_kernels_in_a_graph(small_base: Path, held: Held, interpreted_add: AddTerms) -> None:
    """As the interpreter runs them, where the package is installed."""
    model, reference = graphed(small_base, held, interpreted_add), plain(small_base, held)
    steps = [step for step in mixed_steps(len(held.places), seed=9, texts=3) if step.adapters is not None]
    for step in steps[:4]:
        found, expected = model.forward(step), reference.forward(step)
        if len(found):
            assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


# What only a GPU can show, rehearsed on a CPU: these steps are captured, and replayed.


def on_device(base: Path, held: Held, device: str, uses_graphs: bool) -> GraphedModel:
    """A model with the hook and the kernels that the service gives it on `device`."""
    torch.set_num_threads(1)
    model = GraphedModel.load_on(device, base, precision="f32", slots=SLOTS, max_length=LONGEST)
    model.uses_graphs = uses_graphs
    memory = held.memory.to(device)
    kernels = grouped_loading.load(64, memory, pytest.fail)
    assert kernels is not None
    layers = model.architecture.layers
    model.linear_hook = GraphLoraHook(memory, held.places_of, kernels, slots=SLOTS, layers=layers)
    return model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(3))
def test_captured_steps(small_base: Path, held: Held, seed: int, device: str) -> None:
    """Decode and mixed steps, some without adapters: the graph, eager on the same device, and each adapter alone."""
    model, eager = (on_device(small_base, held, device, uses_graphs) for uses_graphs in (True, False))
    reference, rows = plain(small_base, held), 0
    for step in mixed_steps(len(held.places), seed):
        found, *others = (one.forward(step).cpu() for one in (model, eager, reference))
        rows += len(found)
        for expected in others if len(found) else ():
            assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert rows > 60 and not eager.graphs
    kinds = {(bool(bounds.chunk), bool(bounds.linears)) for bounds in model.graphs}
    assert kinds >= {(False, True), (True, True)}
