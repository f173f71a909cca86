"""The graphs that are captured when a model is loaded; on a CPU their steps are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shapeshift.engines import cuda_device
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model import cuda_runtime
from shapeshift.fused_decode.model.cuda_runtime import common_bounds, step_within
from shapeshift.fused_decode.model.graphs import device_memory
from shapeshift.fused_decode.model.graphs.bounds import GraphBounds, bounds_of
from shapeshift.fused_decode.model.torch_operations import PLAIN
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.fakes import logger
from tests.fused_decode.decode_models import LONGEST, Tiny, batch, teacher_forced, texts
from tests.fused_decode.test_decode_graphs import SLOTS, TOLERANCE, open_model, reference


@pytest.mark.parametrize("slots", [1, 6, 32, 40, 64])
@pytest.mark.parametrize(
    ("max_length", "prefill_tokens"), [(1024, 256), (1024, 512), (1024, 65), (1024, 1), (100, 256), (2, 256)]
)
def test_each_step_has_its_bounds(slots: int, max_length: int, prefill_tokens: int) -> None:
    longest = -(-max_length // 16) * 16
    bounds = common_bounds(slots, max_length, longest, prefill_tokens)
    assert len(set(bounds)) == len(bounds)
    for one in bounds:
        step = step_within(one, slots, max_length)
        assert bounds_of(step, slots, longest) == one
        assert int((step.starts + step.lengths).max()) <= max_length and len(step.slots) <= slots
        assert step.blocks is not None and int(step.blocks.max()) < longest // 16
    tokens = [one.rows + one.chunk for one in bounds]
    assert tokens == sorted(tokens, reverse=True), "the largest first"


def test_which_are_common() -> None:
    found = common_bounds(32, 1024, 1024, 256)
    single = {(rows, context) for rows in (1, 2, 4, 8, 16, 32) for context in (64, 128, 256)}
    assert {(one.rows, one.context) for one in found if not one.chunk} == single
    mixed = {(rows, size, size) for rows in (8, 32) for size in (64, 128, 256)}
    assert {(one.rows, one.context, one.chunk) for one in found if one.chunk} == mixed
    assert {one.chunk for one in common_bounds(32, 1024, 1024, 64)} == {0, 64}
    assert {one.chunk for one in common_bounds(32, 1024, 1024, 1)} == {0}, "a prompt is fed token by token"
    assert {one.rows for one in common_bounds(40, 1024, 1024, 64) if one.chunk} == {8, 32, 40}


def test_common_steps_need_no_further_graph(tiny: Callable[[str], Tiny]) -> None:
    model, said = open_model(tiny("qwen3")), list[str]()
    model.capture_common(64, 1e12, lambda: 0, said.append)
    made = set(model.graphs)
    assert made == set(common_bounds(SLOTS, LONGEST, model.longest, 64))
    assert said[0].startswith(f"{len(made)} graphs captured in ") and said[0].endswith(
        "; others with their first steps"
    )
    given = texts(SLOTS, seed=10)
    model.forward(batch([text[:1] for text in given], [0, 1, 2, 3, 4, 5], [0] * SLOTS))
    model.forward(batch([given[0][1:2], given[1][:20]], [0, 1], [1, 0]))
    assert set(model.graphs) == made


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_they_wrote_does_not_matter(tiny: Callable[[str], Tiny], family: str) -> None:
    model, given = open_model(tiny(family)), texts(SLOTS, seed=10)
    model.capture_common(64, 1e12, lambda: 0, lambda text: None)
    expected = reference(tiny(family), given)
    for text, place, logits in teacher_forced(model, given, [4, 0, 5, 2, 3, 1], seed=11):
        assert (logits - expected[text][place]).abs().max() < TOLERANCE


STEPS = [step_within(one, 8, 256) for one in common_bounds(8, 256, 256, 256)]


@pytest.mark.parametrize(
    ("seconds", "mib", "count", "reason"),
    [(0.0, 0, len(STEPS), "graphs captured in 0.0 s; others"), (11.0, 0, 3, "30 s are spent"), (0, 30, 4, "100 MiB")],
)
def test_time_and_memory_are_bounded(seconds: float, mib: int, count: int, reason: str) -> None:
    ran, said = list[StepBatch](), list[str]()
    cuda_runtime.capture(
        ran.append, STEPS, 100 << 20, lambda: len(ran) * mib << 20, said.append, clock=lambda: len(ran) * seconds
    )
    assert len(ran) == count and reason in said[0]
    assert said[0].startswith(f"{count} {'' if count == len(STEPS) else f'of {len(STEPS)} '}graphs captured")


@pytest.mark.parametrize(("device", "refused"), [("cpu", False), ("cuda:1", False), ("cuda:1", True)])
def test_a_model_is_loaded_with_them_on_a_gpu_alone(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, refused: bool
) -> None:
    """refused: the check of the kernels has found that they cannot be used there."""
    model, asked = open_model(tiny("qwen3")), list[tuple[int, float, float]]()
    model.kernels = PLAIN if refused else replace(PLAIN, name="kernels")
    monkeypatch.setattr(device_memory, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(cuda_device, "free_memory", lambda index: (1e6, ""))
    monkeypatch.setattr(cuda_runtime.GraphedModel, "load_on", lambda *given, **named: model)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {"cuda:1": 7}.get)
    monkeypatch.setattr(model, "capture_common", lambda most, size, used, log: asked.append((most, size, used())))
    settings = FusedDecodeSettings(checkpoint="any", prefill_tokens=33, max_length=LONGEST)
    cuda_runtime.load(
        *(tiny("qwen3").folder, settings),
        precision="f32",
        device=device,
        kernel_cache=tmp_path,
        extra_elements=0,
        checkpoint_sha256="",
        log=logger(),
    )
    planned = device_memory.graph_bytes(model.architecture, settings, "f32", not refused)
    assert asked == ([] if device == "cpu" else [(33, planned, 7)])


@pytest.mark.gpu
def test_captured_at_load(tiny: Callable[[str], Tiny]) -> None:
    model, given, said = open_model(tiny("qwen3"), "cuda:0"), texts(SLOTS, seed=10), list[str]()
    before = torch.cuda.memory_reserved()
    model.capture_common(64, 1 << 40, lambda: torch.cuda.memory_reserved() - before, said.append)
    made = set(model.graphs)
    assert made == set(common_bounds(SLOTS, LONGEST, model.longest, 64)) and "graphs captured" in said[0]
    step = batch([given[0][:1], given[1][:20]], [0, 1], [0, 0])
    expected = open_model(tiny("qwen3")).forward(step).clone()
    assert (model.forward(step).cpu() - expected).abs().max() < 1e-3
    assert set(model.graphs) == made and GraphBounds(8, 64, 64) in made
