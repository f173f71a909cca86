"""Random tokens and filters, against plain computations row by row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.fused_decode.engine.sampling import device
from shapeshift.fused_decode.engine.sampling.sampler import (
    Integers,
    Sampler,
    SamplingTable,
    logprobs_of,
    splitmix,
    uniforms,
)
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.sampling_params import SamplingParams
from tests.sampling import few

LONGEST = 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class DeviceSampler(Sampler):
    """Takes all logits for those of a device."""

    def choose(
        self, logits: torch.Tensor, slots: Integers, lengths: Integers, *, is_plain: bool = False
    ) -> device.DeviceChoice:
        with torch.inference_mode():
            # As they come from a model: not to be changed outside of this mode.
            given = logits.clone()
        return device.choose(self._table, given, slots, lengths)


@pytest.fixture(params=["native", "device"])
def sampler_of(request: pytest.FixtureRequest, kernel_cache: Path) -> Callable[..., Sampler]:
    """A function that makes a sampler whose slot i has the parameters `given[i]`: C++, or torch as on a device."""
    is_native = request.param == "native"
    if is_native:
        assert native_operations.load(kernel_cache, lambda line: None) is not None, "the native operations need g++"

    def make(*given: dict[str, Any], tokens: np.ndarray | None = None) -> Sampler:
        kind = DeviceSampler if request.param == "device" else Sampler
        return chooser(*given, tokens=tokens, is_native=is_native, kind=kind)

    return make


def chooser(
    *given: dict[str, Any],
    tokens: np.ndarray | None = None,
    is_native: bool = False,
    kind: type[Sampler] = Sampler,
) -> Sampler:
    occurred = np.zeros((len(given), LONGEST), np.int32) if tokens is None else tokens
    table = SamplingTable(len(given), occurred)
    for slot, fields in enumerate(given):
        table.set(slot, SamplingParams(**{"seed": slot, **fields}))
    return kind(table, is_native)


def choose(sampler: Sampler, logits: np.ndarray, slots: list[int], lengths: list[int]) -> list[int]:
    ids, good, _ = sampler.choose(torch.from_numpy(logits.copy()), np.array(slots), np.array(lengths)).result()
    assert good.all()
    return [int(token) for token in ids]


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The probabilities that the filters leave of one row: plainly, by sorting."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0
    if top_p < 1:
        enough = np.cumsum(weights[order]) >= top_p * weights.sum()
        weights[order[int(enough.argmax()) + 1 :]] = 0
    return weights / weights.sum()


# Random numbers.


def test_numbers_are_those_of_the_published_generator() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix(np.full(4, 1234567, np.uint64), np.arange(4)).tolist() == published


def test_numbers_are_spread_evenly() -> None:
    for seeds, positions in ((np.zeros(20000, np.uint64), np.arange(20000)), (np.arange(20000), np.zeros(20000))):
        numbers = uniforms(seeds.astype(np.uint64), positions.astype(np.int64))
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers, 50, (0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 110
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


# Greedy.


def test_temperature_0_takes_the_most_likely_token(sampler_of: Callable[..., Sampler]) -> None:
    rng = np.random.default_rng(0)
    for vocabulary in (3, 64, 1000):
        logits = rng.standard_normal((9, vocabulary)).astype(np.float32)
        sampler = sampler_of(*[{"temperature": 0}] * 9)
        assert choose(sampler, logits, list(range(9)), [1] * 9) == logits.argmax(axis=1).tolist()


def test_repeated_tokens_become_less_likely(sampler_of: Callable[..., Sampler]) -> None:
    rng = np.random.default_rng(1)
    vocabulary, rows = 50, 6
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32)
    tokens = rng.integers(0, vocabulary, (rows, LONGEST)).astype(np.int32)
    lengths = [1, 5, 39, 17, 40, 8]
    penalties = [1.3, 1.0, 4.0, 0.5, 1.1, 2.0]
    fields = [{"temperature": 0, "repetition_penalty": penalty} for penalty in penalties]
    wanted = logits.copy()
    for row in range(rows):
        for token in set(tokens[row, : lengths[row]].tolist()):
            wanted[row, token] *= penalties[row] if wanted[row, token] < 0 else 1 / penalties[row]
    got = choose(sampler_of(*fields, tokens=tokens), logits, list(range(rows)), lengths)
    assert got == wanted.argmax(axis=1).tolist()
    assert got != logits.argmax(axis=1).tolist()


# Random tokens.

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 2.0},
    {"top_k": 250},
    {"top_k": 1000},
    {"top_p": 0.1},
    {"top_p": 0.7},
    {"top_p": 0.98, "temperature": 3.0},
    {"top_p": 0.5, "top_k": 300, "temperature": 5.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.01, "top_p": 0.9},
    {"min_p": 0.05, "top_k": 7, "top_p": 0.8, "temperature": 1.5},
]


@pytest.mark.parametrize("vocabulary", few((5, 130, 1000), (5, 130)))
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_only_filtered_tokens_are_drawn_with_their_probabilities(
    sampler_of: Callable[..., Sampler], vocabulary: int, spread: float
) -> None:
    rng = np.random.default_rng(2)
    usable = [fields for fields in FILTERS if fields.get("top_k", 0) <= vocabulary]
    logits = (rng.standard_normal((len(usable), vocabulary)) * spread).astype(np.float32)
    sampler = sampler_of(*usable)
    draws = 700
    counts = np.zeros((len(usable), vocabulary))
    slots = list(range(len(usable)))
    for position in range(draws):
        counts[slots, choose(sampler, logits, slots, [position] * len(slots))] += 1
    for row, fields in enumerate(usable):
        full: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
        expected = kept(logits[row], **full) * draws
        assert not counts[row][expected == 0].any(), fields
        # Rare tokens are counted together, so that the statistic has its distribution.
        order = np.argsort(expected)
        groups = np.searchsorted(np.cumsum(expected[order]), np.arange(1, 31) * draws / 30 - 1e-6)
        parts = [part for part in np.split(order, np.unique(groups)) if expected[part].sum() > 5]
        got = np.array([[counts[row][part].sum(), expected[part].sum()] for part in parts])
        statistic = ((got[:, 0] - got[:, 1]) ** 2 / got[:, 1]).sum()
        assert statistic < len(parts) + 6 * np.sqrt(2 * len(parts)) + 6, (fields, statistic, len(parts))


def test_a_draw_depends_on_seed_position_and_logits_alone(sampler_of: Callable[..., Sampler]) -> None:
    rng = random.Random(3)
    vocabulary = 700
    logits = np.random.default_rng(3).standard_normal((len(FILTERS), vocabulary)).astype(np.float32) * 2
    usable = [{**fields, "top_k": min(fields.get("top_k", 0), vocabulary)} for fields in FILTERS]
    sampler = sampler_of(*usable)
    lengths = [rng.randrange(LONGEST) for _ in usable]
    alone = [choose(sampler, logits[[slot]], [slot], [lengths[slot]])[0] for slot in range(len(usable))]
    for _ in range(60):
        slots = rng.sample(range(len(usable)), rng.randint(1, len(usable)))
        got = choose(sampler, logits[slots], slots, [lengths[slot] for slot in slots])
        assert got == [alone[slot] for slot in slots]
    other = [choose(sampler, logits[[slot]], [slot], [lengths[slot] + 1])[0] for slot in range(len(usable))]
    assert alone != other


def test_without_a_seed_each_request_gets_its_own() -> None:
    table = SamplingTable(4, np.zeros((4, LONGEST), np.int32))
    for slot, seed in enumerate((7, -1, None, None)):
        table.set(slot, SamplingParams(seed=seed))
    assert table.seed[0] == 7 and table.seed[1] == 2**64 - 1
    assert table.seed[2] != table.seed[3]


def test_logits_that_are_not_finite_are_reported_row_by_row(sampler_of: Callable[..., Sampler]) -> None:
    logits = np.zeros((5, 100), np.float32)
    logits[1, 3], logits[2, 99], logits[3, 0] = np.nan, np.inf, -np.inf
    for temperature in (0.0, 1.0):
        sampler = sampler_of(*[{"temperature": temperature, "top_p": 0.9}] * 5)
        _, good, _ = sampler.choose(torch.from_numpy(logits.copy()), np.arange(5), np.full(5, 2)).result()
        assert good.tolist() == [True, False, False, True, True]


def test_extreme_temperatures(sampler_of: Callable[..., Sampler]) -> None:
    logits = np.array([[0.0, 1.0, 0.5]] * 3, np.float32)
    sampler = sampler_of({"temperature": 1e-30}, {"temperature": 1e30}, {"temperature": 1e-60})
    drawn = {tuple(choose(sampler, logits, [0, 1, 2], [position] * 3)) for position in range(200)}
    assert {row[0] for row in drawn} == {1} and {row[2] for row in drawn} == {1}
    assert {row[1] for row in drawn} == {0, 1, 2}


def test_the_limits_of_parameters_give_finite_scores(sampler_of: Callable[..., Sampler]) -> None:
    given = [{"repetition_penalty": 1e30}, {"repetition_penalty": 1e-30}, {"top_p": 1e-30}]
    sampler = sampler_of(*given, tokens=np.array([[1, 2]] * 3, np.int32))
    logits = np.array([[1.0, 20.0, -20.0, 0.5]] * 3, np.float32)
    ids, finite, _ = sampler.choose(torch.from_numpy(logits), np.arange(3), np.full(3, 2)).result()
    assert finite.all() and ids[0] in (0, 1, 3) and ids[1] == ids[2] == 1


def test_draws_of_the_kernel_are_those_of_torch(kernel_cache: Path) -> None:
    assert native_operations.load(kernel_cache, lambda line: None) is not None, "the native operations need g++"
    rng = np.random.default_rng(5)
    asked = different = 0
    for vocabulary in (3, 64, 65, 1000, 4099):
        usable = [{**fields, "top_k": min(fields.get("top_k", 0), vocabulary)} for fields in FILTERS]
        # Without the kernel, torch draws.
        samplers = [chooser(*usable), chooser(*usable, is_native=True)]
        slots = list(range(len(usable)))
        for spread in (0.01, 1.0, 4.0):
            logits = (rng.standard_normal((len(usable), vocabulary)) * spread).astype(np.float32)
            # As bf16 would have them: many are equal.
            logits[::2] = torch.from_numpy(logits[::2]).bfloat16().float().numpy()
            for position in range(30):
                plain, given = (choose(sampler, logits, slots, [position] * len(slots)) for sampler in samplers)
                asked += len(slots)
                different += sum(a != b for a, b in zip(plain, given, strict=True))
    # At the boundary between two tokens, rounding may choose either.
    assert different <= asked // 500


def test_logprobs_of_a_device_are_those_of_numpy_before_the_edits() -> None:
    rng = np.random.default_rng(6)
    asked = [None, 0, 5, 20, 20, 1]
    fields = [{"temperature": 0, "logprobs": count, "repetition_penalty": 3.0} for count in asked]
    sampler = chooser(*fields, kind=DeviceSampler)
    logits = (rng.standard_normal((6, 300)) * 4).astype(np.float32)
    logits[3] = np.round(logits[3])
    ids, _, logprobs = sampler.choose(torch.from_numpy(logits), np.arange(6), np.full(6, 3)).result()
    wanted = logprobs_of(logits, ids, np.array([count or 0 for count in asked]))
    assert list(logprobs) == [1, 2, 3, 4, 5]
    for row, own in logprobs.items():
        assert own.rank == wanted[row].rank and own.top.tolist() == wanted[row].top.tolist()
        assert own.logprob == pytest.approx(wanted[row].logprob, abs=1e-5)
        np.testing.assert_allclose(own.top_logprobs, wanted[row].top_logprobs, atol=1e-5)


@pytest.mark.gpu
def test_draws_on_a_gpu_are_those_on_a_cpu() -> None:
    rng = np.random.default_rng(7)
    asked = different = 0
    for vocabulary in (65, 4099, 128_000):
        sampler = chooser(*FILTERS)
        slots = np.arange(len(FILTERS))
        logits = torch.from_numpy((rng.standard_normal((len(FILTERS), vocabulary)) * 3).astype(np.float32))
        for position in range(10):
            lengths = np.full(len(FILTERS), position)
            here = sampler.choose(logits.clone(), slots, lengths).result().ids
            there = sampler.choose(logits.to("cuda:0"), slots, lengths).result().ids
            asked += len(slots)
            different += int((here != there).sum())
    assert different <= asked // 100
