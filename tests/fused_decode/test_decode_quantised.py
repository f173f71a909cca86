"""Weights in levels: quantising, and the kernels against plain torch, in the integer part bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shapeshift.engines import hardware
from shapeshift.errors import UnsupportedError
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.model.quantised import LevelLinear, NativeLevelLinear, quantise_rows
from shapeshift.fused_decode.model.torch_operations import PlainLinear
from shapeshift.fused_decode.settings import group_of, resolve
from shapeshift.kernels import kernel_build
from shapeshift.kernels.levels import Levels, quantise
from tests.fused_decode.decode_models import Tiny, batch, texts
from tests.fused_decode.test_decode_native import assert_rows_are_independent, normal

INSTRUCTIONS = ("tiles", "quads", "plain")
# Outputs, inputs, and inputs of a group: whole ones, and a last one with fewer inputs, in blocks of 32 and of 64.
SHAPES = [(7, 3, 0), (70, 33, 0), (33, 64, 0), (96, 544, 0), (96, 544, 128), (65, 200, 32), (40, 200, 96)]
# Their inputs are read in several parts, some of which end within a group.
LARGE = [(33, 1120, 96), (33, 1100, 192), (33, 1120, 0)]

of_bits = pytest.mark.parametrize("bits", [8, 4])


@pytest.fixture(scope="module", autouse=True)
def operations(kernel_cache: Path) -> None:
    assert native_operations.load(kernel_cache, lambda line: None) is not None, "the native operations need g++"


def native(weight: Levels, bias: torch.Tensor | None, instructions: str) -> NativeLevelLinear:
    try:
        return NativeLevelLinear(weight, bias, instructions)
    except RuntimeError as error:
        assert "this CPU, or this number of inputs, has none such" in str(error)
        pytest.skip(f"no {instructions} on this CPU")


@of_bits
@pytest.mark.parametrize("group", [0, 32, 128])
def test_a_weight_is_within_half_a_step(bits: int, group: int) -> None:
    weight = normal(6, 200, seed=1)
    weight[2] = 0.0
    levels = quantise(weight, bits, group)
    steps = levels.scales.repeat_interleave(group or 200, dim=1)[:, :200]
    assert levels.levels.max() <= 2**bits - 1 and levels.levels.min() >= 1
    assert ((levels.weight() - weight).abs() <= steps / 2 * (1 + 1e-5)).all()
    assert torch.equal(quantise(levels.weight(), bits, group).levels, levels.levels)


def test_a_row_is_quantised_by_itself() -> None:
    rows = normal(4, 50, seed=1)
    rows[1] *= 1000
    rows[2] = 0.0
    levels, scales = quantise_rows(rows)
    assert ((levels * scales - rows).abs() <= scales / 2 * (1 + 1e-5)).all()
    assert levels[0].abs().max() == 127 and torch.equal(quantise_rows(rows[:1])[0], levels[:1])


@of_bits
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_kernels_compute_what_torch_does(bits: int, outputs: int, inputs: int, group: int, instructions: str) -> None:
    weight, bias = quantise(normal(outputs, inputs, seed=1), bits, group), normal(outputs, seed=2)
    rows = normal(300, inputs, seed=3)
    for given in (None, bias):
        fast = native(weight, given, instructions)
        assert fast.packed.instructions() == instructions
        whole, plain = fast(rows), LevelLinear(weight, given)(rows)
        assert torch.allclose(whole, plain, rtol=1e-6, atol=1e-5)
        assert torch.equal(fast(rows.bfloat16()), fast(rows.bfloat16().float()).bfloat16())
        if group == 0 and given is None:
            assert torch.equal(whole, plain), "one group has one rounding"
        assert_rows_are_independent(fast, rows, whole)


@of_bits
@pytest.mark.parametrize("with_minima", [False, True])
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(("outputs", "inputs", "group"), [*SHAPES, *LARGE])
def test_sums_of_levels_are_exact(
    bits: int, outputs: int, inputs: int, group: int, instructions: str, with_minima: bool
) -> None:
    """With scales of 1 results are whole numbers, which f32 holds; zeros and minima differ from group to group."""
    chance = torch.Generator().manual_seed(4)
    levels = torch.randint(0, 2**bits, (outputs, inputs), generator=chance).byte()
    groups = -(-inputs // (group or inputs))
    zeros = torch.randint(0, 2**bits, (outputs, groups), generator=chance).byte()
    minima = torch.randint(-9, 9, (outputs, groups), generator=chance).float() if with_minima else None
    weight = Levels(levels, torch.ones(outputs, groups), zeros, bits, group, minima)
    rows = torch.randint(-127, 128, (40, inputs), generator=chance).float()
    rows[:, :: group or inputs] = 127.0
    exact = (rows.double() @ weight.weight().double().T).float()
    fast = native(weight, None, instructions)
    assert torch.equal(fast(rows), exact)
    assert_rows_are_independent(fast, rows, exact)
    assert torch.equal(LevelLinear(weight, None)(rows), exact)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_the_largest_levels_do_not_overflow(instructions: str) -> None:
    """All products at their limit: the sums of two no longer fit 16 bits."""
    weight = Levels(torch.full((33, 512), 255).byte(), torch.ones(33, 1), torch.zeros(33, 1).byte(), 8, 0)
    for sign in (1.0, -1.0):
        rows = torch.full((17, 512), sign * 127)
        assert (native(weight, None, instructions)(rows) == sign * 127 * 255 * 512).all()


@of_bits
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_in_its_row(bits: int, value: float) -> None:
    weight = quantise(normal(40, 64, seed=1), bits, 0)
    rows = normal(20, 64, seed=2)
    rows[7, 5] = value
    for linear in (NativeLevelLinear(weight, None), LevelLinear(weight, None)):
        finite = linear(rows).isfinite().all(dim=1)
        assert finite.tolist() == [row != 7 for row in range(20)]


def test_the_best_instructions_for_levels_are_those_of_the_cpu() -> None:
    flags = kernel_build.cpu_flags().split()
    best = "tiles" if "amx_int8" in flags else "quads" if "avx512_vnni" in flags else "plain"
    assert NativeLevelLinear(quantise(normal(8, 65, seed=1), 8, 0), None).packed.instructions() == best


@pytest.mark.parametrize("part", ["packed", "scales", "zeros", "minima", "bias"])
def test_a_linear_has_no_copy_of_what_processes_share(part: str) -> None:
    weight = quantise(normal(5, 64, seed=1), 8, 32)
    linear = NativeLevelLinear(replace(weight, minima=weight.scales.clone()), normal(5, seed=2))
    rows = normal(1, 64, seed=3)
    before = linear(rows)
    linear.weight.tensors[part].zero_()
    assert not torch.equal(linear(rows), before)


def test_invalid_levels_are_refused() -> None:
    weight = quantise(normal(5, 64, seed=1), 4, 32)
    for changes, message in (
        ({"group": 33}, "group: must be a multiple of 32"),
        ({"scales": weight.scales[:, :1].contiguous()}, r"scales: must be \[1, 2, 32\]"),
        ({"zeros": weight.zeros.int()}, "zeros: must be contiguous Byte"),
        ({"zeros": weight.zeros + 121}, "zeros: must be at most 128"),
        ({"minima": weight.scales[:, :1]}, r"minima: must be \[1, 2, 32\]"),
        ({"minima": weight.zeros}, "minima: must be contiguous Float"),
        ({"levels": torch.zeros(1, 65537).byte()}, "levels: must have 1 to 65536 inputs"),
    ):
        wrong = Levels(**{**vars(weight), **changes})
        with pytest.raises(RuntimeError, match=message):
            NativeLevelLinear(wrong, None)
    with pytest.raises(RuntimeError, match="bias: must have an element for each output"):
        NativeLevelLinear(weight, normal(4, seed=2))


# Whole models.


def load(folder: Path, kernels: Path, precision: str, native: bool = True, group_size: int = 0) -> DecodeModel:
    return DecodeModel.load(
        folder,
        ModelOptions(
            precision=precision,
            group_size=group_size,
            slots=2,
            max_length=96,
            threads=2,
            native=native,
            cache_dir=kernels,
        ),
        lambda line: None,
    )


@pytest.mark.parametrize(("precision", "group_size"), [("int8", 0), ("int4", 0), ("int4", 32)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_native_logits_are_those_of_torch(
    tiny: Callable[[str], Tiny],
    kernel_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    precision: str,
    group_size: int,
) -> None:
    """In f32, as on a CPU without bf16. Where a level is rounded the other way, logits differ by a part of a step."""
    monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: False)
    fast, plain = (load(tiny(family).folder, kernel_cache, precision, native, group_size) for native in (True, False))
    assert (fast.operations.name, plain.operations.name) == ("native", "torch")
    assert fast.memory.dtype == plain.memory.dtype == torch.float32
    text = texts(1, seed=3)[0]
    for start, end in [(0, 9), *((place, place + 1) for place in range(9, 20))]:
        one, other = (model.forward(batch([text[start:end]], [1], [start])) for model in (fast, plain))
        assert (one - other).abs().max() < 0.02 * other.abs().max()


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.06), ("int4", 0.6)])
def test_logits_are_near_those_in_f32(
    tiny: Callable[[str], Tiny], kernel_cache: Path, precision: str, most: float
) -> None:
    text = texts(1, seed=5, shortest=40)[0]
    logits = [
        load(tiny("llama").folder, kernel_cache, name).forward(batch([text], [0], [0])) for name in ("f32", precision)
    ]
    off = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    assert 0.0 < off < most


def test_a_group_is_what_divides_the_inputs() -> None:
    assert [group_of(4, inputs) for inputs in (256, 96, 112)] == [128, 32, 32]
    assert (group_of(4, 256, 32), group_of(8, 256, 32)) == (32, 0)


def test_quantised_weights_are_for_cpus() -> None:
    assert resolve("int8") == "int8"
    with pytest.raises(UnsupportedError, match="precision: int4 is for CPUs"):
        resolve("int4", device=0)
    with pytest.raises(UnsupportedError, match="precision: f16 is for GPUs"):
        resolve("f16")


def test_linears_agree_with_the_weights_that_levels_stand_for() -> None:
    weight, rows = quantise(normal(9, 640, seed=1), 4, 128), normal(3, 640, seed=2)
    off = LevelLinear(weight, None)(rows) - PlainLinear(weight.weight(), None)(rows)
    assert off.abs().max() < 0.03 * PlainLinear(weight.weight(), None)(rows).abs().max()
