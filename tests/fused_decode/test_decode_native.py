"""The native operations: equal to the torch ones, compiled once, and replaced without a compiler."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.native_operations import NativeLinear, NativeOperations
from shapeshift.fused_decode.model.network import ACTIVATIONS, AttentionLayer, Operations
from shapeshift.fused_decode.model.quantised import quantise_rows
from shapeshift.fused_decode.model.torch_operations import PlainLinear, TorchOperations
from shapeshift.fused_decode.settings import KV_PRECISIONS
from shapeshift.kernels import kernel_build
from tests.fused_decode.decode_models import batch

PROJECT = Path(__file__).resolve().parents[2]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SLOTS, LENGTH = 5, 300
TEXT_BLOCKS = -(-LENGTH // BLOCK_TOKENS)

both_types = pytest.mark.parametrize("dtype", TOLERANCES, ids=["f32", "bf16"])


@pytest.fixture(scope="module")
def operations(kernel_cache: Path) -> NativeOperations:
    found = native_operations.load(kernel_cache, lambda line: None)
    assert found is not None, "the native operations need g++"
    return found


@pytest.fixture(autouse=True)
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    normed: bool,
    score_cap: float = 0.0,
    kv_precision: str = "auto",
) -> AttentionLayer:
    """With a score cap also a rotary table for each slot, as texts of different lengths have."""
    angles = normal(SLOTS if score_cap else 1, LENGTH, head_dim // 2, seed=1)
    cosines, sines = (table.expand(SLOTS, -1, -1) for table in (angles.cos(), angles.sin()))
    norms = [1.0 + 0.2 * normal(head_dim, seed=seed) if normed else None for seed in (2, 3)]
    shape = (SLOTS * TEXT_BLOCKS, kv_heads, BLOCK_TOKENS, head_dim)
    keys, values = (normal(*shape, seed=seed, dtype=dtype) for seed in (4, 5))
    scale = 0.7 * head_dim**-0.5
    own = AttentionLayer(keys, values, cosines, sines, norms[0], norms[1], 1e-5, window, scale, score_cap)
    if kv_precision == "auto":
        return own
    (keys, key_scales), (values, value_scales) = (quantise_rows(one) for one in (keys, values))
    key_scales, value_scales = key_scales[..., 0], value_scales[..., 0]
    return dataclasses.replace(own, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)


def cached(own: AttentionLayer) -> list[torch.Tensor]:
    """The keys and the values that the cache stands for."""
    held = ((own.keys, own.key_scales), (own.values, own.value_scales))
    return [one.float() if scales is None else one * scales[..., None] for one, scales in held]


def scattered(given: StepBatch) -> StepBatch:
    """With blocks in any order."""
    numbers = torch.randperm(SLOTS * TEXT_BLOCKS, generator=torch.Generator().manual_seed(7)).int()
    return dataclasses.replace(given, blocks=numbers[: len(given.slots) * TEXT_BLOCKS].view(-1, TEXT_BLOCKS))


def mixed_batch() -> StepBatch:
    """Two single tokens, one of them the first of its text, and chunks that take one and several tiles."""
    lengths, starts = [1, 70, 1, 5], [130, 200, 0, 64]
    return batch([torch.zeros(length, dtype=torch.int64) for length in lengths], [3, 0, 4, 1], starts)


def single_batch() -> StepBatch:
    return batch([torch.zeros(1, dtype=torch.int64)] * 4, [2, 0, 4, 1], [63, 64, 299, 0])


@both_types
@pytest.mark.parametrize("kv_precision", KV_PRECISIONS)
@pytest.mark.parametrize("rows", [mixed_batch, single_batch])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "normed", "score_cap"),
    [
        (4, 4, 64, 0, False, 0.0),
        (6, 2, 128, 0, True, 0.0),
        (6, 1, 48, 33, False, 0.0),
        (3, 3, 6, 1, True, 0.0),
        (6, 2, 64, 0, False, 0.5),
        (4, 2, 48, 33, True, 3.0),
    ],
)
def test_attention(
    operations: NativeOperations,
    rows: Callable[[], StepBatch],
    dtype: torch.dtype,
    kv_precision: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    normed: bool,
    score_cap: float,
) -> None:
    given = scattered(rows())
    qkv = normal(int(given.lengths.sum()), (heads + 2 * kv_heads) * head_dim, seed=6, dtype=dtype)
    outs, layers = [], []
    both: tuple[Operations, ...] = (TorchOperations(), operations)
    for chosen in both:
        layers.append(layer(kv_heads, head_dim, dtype, window, normed, score_cap, kv_precision))
        outs.append(chosen.attention(qkv, layers[-1], chosen.plan(given, kv_heads)))
    before = layer(kv_heads, head_dim, dtype, window, normed, score_cap, kv_precision)
    # Between two levels rounding may choose either.
    level = 0.0 if kv_precision == "auto" else 0.06
    for plain, fast, old in zip(*(cached(held) for held in (*layers, before)), strict=True):
        assert torch.allclose(fast, plain, rtol=TOLERANCES[dtype] / 2, atol=TOLERANCES[dtype] / 2 + level)
        assert ((fast - plain).abs() > TOLERANCES[dtype]).float().mean() < 1e-3
        assert int((fast != old).any(dim=-1).sum()) == len(qkv) * kv_heads
    tolerance = TOLERANCES[dtype] + level / 10
    assert torch.allclose(outs[1].float(), outs[0].float(), rtol=tolerance, atol=tolerance)


def test_scales_that_do_not_fit_the_cache_are_refused(operations: NativeOperations) -> None:
    given, qkv = scattered(single_batch()), normal(4, 3 * 2 * 8, seed=1)
    own = layer(2, 8, torch.float32, 0, False, kv_precision="int8")
    assert own.value_scales is not None
    for changes, says in (
        ({"value_scales": None}, "both or none"),
        ({"value_scales": own.value_scales[1:]}, "value_scales the same"),
        ({"keys": own.keys.float(), "values": own.values.float()}, "or Char with scales"),
        ({"key_scales": None, "value_scales": None}, "or Char with scales"),
    ):
        with pytest.raises(RuntimeError, match=says):
            operations.attention(qkv, dataclasses.replace(own, **changes), operations.plan(given, 2))


@both_types
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_norm_with_residual(operations: NativeOperations, dtype: torch.dtype, tokens: int) -> None:
    width = 771
    for delta in (None, normal(tokens, width, seed=2, dtype=dtype)):
        state, weight = normal(tokens, width, seed=1), normal(width, seed=3)
        states = [state.clone(), state.clone()]
        plain = TorchOperations().add_norm(states[0], delta, weight, 1e-3, dtype)
        fast = operations.add_norm(states[1], delta, weight, 1e-3, dtype)
        assert torch.equal(states[0], states[1])
        assert torch.equal(states[1], state) == (delta is None)
        assert torch.allclose(fast.float(), plain.float(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@both_types
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(operations: NativeOperations, dtype: torch.dtype, activation: str, gated: bool) -> None:
    both = normal(70, 2 * 203, seed=1, dtype=dtype) * 8
    both[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.5])
    plain, fast = (each.activate(both, activation, gated) for each in (TorchOperations(), operations))
    assert torch.allclose(fast.float(), plain.float(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    for row in (1, 69):
        assert torch.equal(operations.activate(both[row : row + 1], activation, gated)[0], fast[row])
    both[0, 0] = float("nan")
    assert operations.activate(both, activation, gated)[0, 0].isnan()


@pytest.mark.parametrize(("outputs", "inputs"), [(7, 3), (70, 33), (96, 515)])
def test_linear(operations: NativeOperations, outputs: int, inputs: int) -> None:
    weight, bias = normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    rows = normal(300, inputs, seed=3)
    for given in (None, bias):
        fast = NativeLinear(weight, given)
        whole = fast(rows)
        assert torch.allclose(whole, PlainLinear(weight, given)(rows), rtol=1e-4, atol=1e-4)
        assert_rows_are_independent(fast, rows, whole)


@pytest.mark.parametrize("instructions", ["tiles", "pairs", "plain"])
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 3), (70, 33), (33, 64), (96, 544)])
def test_linear_of_bf16(operations: NativeOperations, outputs: int, inputs: int, instructions: str) -> None:
    weight, bias = (normal(*shape, seed=1, dtype=torch.bfloat16) for shape in ((outputs, inputs), (outputs,)))
    rows = normal(300, inputs, seed=3, dtype=torch.bfloat16)
    for given in (None, bias):
        try:
            fast = NativeLinear(weight, given, instructions)
        except RuntimeError as error:
            assert "this CPU, or this number of inputs, has none such" in str(error)
            pytest.skip(f"no {instructions} of {inputs} inputs on this CPU")
        whole = fast(rows)
        assert whole.dtype == torch.bfloat16
        # The sums are f32, so that only the result is rounded: half a unit in the last of 8 places.
        exact = PlainLinear(weight.float(), None if given is None else given.float())(rows.float())
        assert torch.allclose(whole.float(), exact, rtol=2**-8, atol=1e-4)
        assert_rows_are_independent(fast, rows, whole)


def test_the_best_instructions_are_those_of_the_cpu(operations: NativeOperations) -> None:
    flags = kernel_build.cpu_flags().split()
    best = "tiles" if "amx_bf16" in flags else "pairs" if "avx512_bf16" in flags else "plain"
    for inputs, wanted in ((64, best), (65, "pairs" if best == "tiles" else best)):
        assert NativeLinear(normal(8, inputs, seed=1, dtype=torch.bfloat16), None).packed.instructions() == wanted


def assert_rows_are_independent(linear: NativeLinear, rows: torch.Tensor, whole: torch.Tensor) -> None:
    for count in (0, 1, 2, 3, 5, 9, 13, 17, 33, 257):
        assert torch.equal(linear(rows[:count]), whole[:count]), "a row depends on the other rows"
    poisoned = rows.clone()
    poisoned[1::2] = float("nan")
    assert torch.equal(linear(poisoned)[::2], whole[::2]), "a row depends on the other rows"


def test_invalid_linears_are_refused(operations: NativeOperations) -> None:
    weight = normal(5, 4, seed=1)
    with pytest.raises(RuntimeError, match="bias: must have an element for each output"):
        NativeLinear(weight, normal(4, seed=2))
    with pytest.raises(RuntimeError, match="bias: must be contiguous BFloat16"):
        NativeLinear(weight.bfloat16(), normal(5, seed=2))
    with pytest.raises(RuntimeError, match="instructions: fast"):
        NativeLinear(weight.bfloat16(), None, "fast")
    with pytest.raises(RuntimeError, match=r"rows: must be \[rows, 4\]"):
        NativeLinear(weight, None)(normal(2, 5, seed=3))


@pytest.mark.parametrize(("slot", "start"), [(SLOTS, 0), (-1, 0), (0, LENGTH), (0, -1)])
def test_tasks_outside_the_cache_are_refused(operations: NativeOperations, slot: int, start: int) -> None:
    given = scattered(batch([torch.zeros(1, dtype=torch.int64)], [slot], [start]))
    qkv = normal(1, 3 * 2 * 8, seed=1)
    with pytest.raises(RuntimeError, match="lies outside the cache"):
        operations.attention(qkv, layer(2, 8, torch.float32, 0, False), operations.plan(given, 2))


def test_blocks_outside_the_cache_are_refused_by_the_operations(operations: NativeOperations) -> None:
    given = scattered(single_batch())
    assert given.blocks is not None
    given.blocks[3, 2] = SLOTS * TEXT_BLOCKS
    with pytest.raises(RuntimeError, match=f"blocks: must be 0 to {SLOTS * TEXT_BLOCKS - 1}"):
        operations.attention(
            normal(4, 3 * 2 * 8, seed=1), layer(2, 8, torch.float32, 0, False), operations.plan(given, 2)
        )


# Compiling.

# Replaces g++: records each call, waits a moment, and creates an empty output file.
FAKE = """#!/bin/sh
case "$1" in --version) echo fake 1.0; exit 0;; esac
echo call >> "$0.calls"
sleep 0.3
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


def fake_compiler(folder: Path, text: str = FAKE) -> Path:
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(text)
    compiler.chmod(0o755)
    return compiler


def test_processes_compile_once(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path / "bin")
    script = (
        "import sys; from pathlib import Path; from shapeshift.fused_decode.model import native_operations; "
        "sys.stdout.write(str(native_operations.library(Path(sys.argv[1]))))"
    )
    environment = os.environ | {"PATH": f"{compiler.parent}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate(timeout=120)[0] for process in running}
    assert len(names) == 1
    assert Path(names.pop()).is_file()
    calls = len(list(native_operations.KERNELS.glob("*.cpp"))) + 1
    assert (tmp_path / "bin" / "g++.calls").read_text() == "call\n" * calls, "one for each source, one to link"
    left = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert left == {".so", ".lock"}


def test_a_compilation_says_what_it_does_and_ends_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path / "bin", FAKE.replace("sleep 0.3", ""))
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    said: list[str] = []
    native_operations.library(tmp_path / "cache", said.append)
    count = len(list(native_operations.KERNELS.glob("*.cpp")))
    assert said[0] == f"compiling the decode kernels for this CPU, once, in a minute or more: 0 of {count} files"
    said.clear()
    native_operations.library(tmp_path / "cache", said.append)
    assert said == [], "they are there"

    def stop(step: str) -> None:
        raise KeyboardInterrupt

    compiler.write_text(FAKE.replace("sleep 0.3", "exec sleep 600"))
    with pytest.raises(KeyboardInterrupt):
        native_operations.library(tmp_path / "other", stop)
    assert {path.suffix for path in (tmp_path / "other").iterdir()} <= {".lock"}


def test_the_library_depends_on_sources_compiler_and_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_compiler(tmp_path / "bin", FAKE.replace("sleep 0.3", ""))
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    kernels, headers = tmp_path / "kernels", tmp_path / "headers"
    kernels.mkdir()
    headers.mkdir()
    source, header, shared = kernels / "decode.cpp", kernels / "attention.h", headers / "common.h"
    for file in (source, header, shared):
        file.write_text("// one")
    monkeypatch.setattr(kernel_build, "HEADERS", headers)

    def library() -> Path:
        return kernel_build.library(tmp_path / "cache", kernels, "decode")

    libraries = [library()]
    assert library() == libraries[0]
    for file in (source, header, shared):
        file.write_text("// two")
        libraries.append(library())
    compiler.write_text(FAKE.replace("1.0", "1.1"))
    libraries.append(library())
    monkeypatch.setattr(kernel_build, "cpu_flags", lambda: "flags : sse2")
    assert len({*libraries, library()}) == 6


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, r"no g\+\+ found"), (FAKE.replace("sleep 0.3", "echo 'x.cpp:1: error: no' >&2; exit 1"), "error: no")],
    ids=["no compiler", "compiler fails"],
)
def test_one_line_says_why_there_are_no_native_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, reason: str
) -> None:
    monkeypatch.setattr(native_operations, "_NAMESPACE", "shapeshift_decode_of_another_name")
    folder = tmp_path / "bin"
    if text is None:
        monkeypatch.setenv("PATH", str(folder))
    else:
        fake_compiler(folder, text)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    lines: list[str] = []
    assert native_operations.load(tmp_path / "cache", lines.append) is None
    assert len(lines) == 1
    assert re.search(rf"plain torch.*{reason}", lines[0])
