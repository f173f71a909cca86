"""What only a GPU can prove of graphs, memory and streams. A CPU rehearses each test: there a graph is computed."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from tests.fused_decode import sanitized_steps
from tests.fused_decode.decode_models import LONGEST, Tiny, batch, texts
from tests.fused_decode.test_decode_graphs import SLOTS, TOLERANCE, beside_chunks, generate, open_model, reference

PROJECT = Path(__file__).resolve().parents[2]
GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", GPU])


class BothWays:
    """A model that computes each step with a graph and without one, and compares."""

    def __init__(self, model: GraphedModel) -> None:
        self.model = model
        self.compared = 0

    def forward(self, step: StepBatch) -> torch.Tensor:
        found = []
        for self.model.uses_graphs in (False, True):
            found.append(self.model.forward(step).clone())
        torch.testing.assert_close(found[1], found[0], atol=TOLERANCE, rtol=0)
        self.compared += len(step.logit_rows)
        return found[1]


@on_devices
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_graph_gives_what_the_eager_step_gives(tiny: Callable[[str], Tiny], family: str, device: str) -> None:
    """Decode steps, and mixed ones; each graph is captured with one step and replayed with others."""
    model = open_model(tiny(family), device)
    both = BothWays(model)
    model.memory.fill_(float("nan"))
    for _ in beside_chunks(both, texts(SLOTS, seed=15), [4, 0, 5, 2, 3, 1], seed=16):  # type: ignore[arg-type]
        pass
    assert both.compared > 100 and {bool(one.chunk) for one in model.graphs} == {False, True}


@on_devices
@pytest.mark.parametrize("uses_graphs", [True, False])
def test_no_step_writes_outside_the_blocks_of_its_rows(
    tiny: Callable[[str], Tiny], device: str, uses_graphs: bool
) -> None:
    """Also not behind the last block, where adapters lie."""
    model = GraphedModel.load_on(
        device, tiny("qwen3").folder, precision="f32", slots=SLOTS, max_length=LONGEST, extra_elements=512
    )
    model.uses_graphs = uses_graphs
    memory = model.memory
    memory.fill_(float("nan"))
    given = texts(2, seed=18)
    each = -(-LONGEST // BLOCK_TOKENS)
    for start in range(3):
        model.forward(batch([given[0][start : start + 1], given[1][:9]], [4, 1], [start, 0]))
    written = (~memory[: SLOTS * each * model.block_elements].isnan()).view(SLOTS, -1).any(1).nonzero()[:, 0].tolist()
    assert written == [1, 4]
    tokens = (~memory.isnan()).sum() // (model.block_elements // BLOCK_TOKENS)
    assert int(tokens) == 3 + 9 and memory[-512:].isnan().all()


@on_devices
def test_the_pool_is_whole_after_random_steps(tiny: Callable[[str], Tiny], device: str) -> None:
    """Fewer blocks than the texts want: requests are preempted, and prefixes are shared."""
    model = GraphedModel.load_on(
        device,
        tiny("llama").folder,
        precision="f32",
        slots=SLOTS,
        max_length=LONGEST,
        blocks=3 * SLOTS,
        extra_elements=512,
    )
    model.memory.fill_(float("nan"))
    rng, made = random.Random(23), list[Request]()
    admission: FirstComeFirstServed[Request] = FirstComeFirstServed(1000)
    pool = BlockPool(model.blocks, caching=True)
    loop = DecodeLoop(model, admission, lambda requests: None, print, pool=pool, prefill_tokens=64)
    table, common = [b"?"] * model.vocab_size, [rng.randrange(9, 60) for _ in range(40)]
    for count in range(300):
        if len(admission) < 2:
            own = [rng.randrange(9, 60) for _ in range(rng.randint(1, 30))]
            prompt = np.array(common[: rng.choice((0, 20, 40))] + own)
            params = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=count, max_tokens=rng.randint(1, 26))
            made.append(Request(str(count), prompt, params, TextStream(table, ()), max_length=model.max_length))
            loop.submit(made[-1])
        loop.step()
        if count % 10 == 0:
            loop.check_integrity()
    while loop.step():
        pass
    loop.check_integrity()
    assert len(made) > 30 and all(one.is_finished and one.error is None for one in made)
    assert loop.slots.used == 0 and model.memory[-512:].isnan().all()


@on_devices
def test_graphs_after_a_reload(tiny: Callable[[str], Tiny], device: str) -> None:
    """The memory of a model that has gone is used again, while the graphs of another one are replayed."""
    given = texts(2, seed=19)
    expected = reference(tiny("llama"), given)
    models = [open_model(tiny("llama"), device) for _ in range(2)]
    for turn in range(4):
        if turn % 2:
            # First it goes, as where Triton reloads a model.
            models.pop()
            gc.collect()
            models.append(open_model(tiny("llama"), device))
        for model, text, own in zip(models, given, expected, strict=True):
            for length in (20, 1):
                logits = model.forward(batch([text[:length]], [turn], [0]))
                assert (logits.cpu()[0] - own[length - 1]).abs().max() < TOLERANCE
    assert all(len(model.graphs) == 2 for model in models)


def greedy(model: GraphedModel, waits: bool) -> Iterator[torch.Tensor]:
    """The tokens of all slots, step after step, on the device: INT64 [slots]. Each is fed to the next step, which is
    given before they are known unless `waits`."""
    slots, prompts = list(range(SLOTS)), [text[:1] for text in texts(SLOTS, seed=24)]
    step = batch(prompts, slots, [0] * SLOTS)
    assert model.feed is not None
    for place in range(1, 60):
        chosen = model.forward(step).argmax(-1)
        model.feed(chosen)
        if waits and chosen.is_cuda:
            torch.cuda.synchronize()
        yield chosen
        known = chosen.cpu() if waits else torch.zeros(SLOTS, dtype=torch.int64)
        fed = None if waits else torch.ones(SLOTS, dtype=torch.bool)
        step = dataclasses.replace(batch([*known[:, None]], slots, [place] * SLOTS), fed=fed)


@on_devices
@pytest.mark.parametrize("uses_graphs", [True, False])
def test_steps_that_are_launched_early_keep_their_order(
    tiny: Callable[[str], Tiny], device: str, uses_graphs: bool
) -> None:
    """Bit for bit those of a model that waits after each step: the same graphs, with the same rows."""
    found = []
    for waits in (True, False):
        model = open_model(tiny("qwen3"), device)
        model.uses_graphs = uses_graphs
        found.append(torch.stack(list(greedy(model, waits))).cpu())
    assert torch.equal(found[0], found[1]) and len(found[0].unique()) > 10


@on_devices
def test_a_loop_that_launches_ahead(tiny: Callable[[str], Tiny], device: str) -> None:
    """Its steps have a row too many where an answer has just ended: other kernels of a GPU may compute those, so that
    one request of the 16 may choose another token of two that are equally likely in rounding."""
    found = []
    for ahead in (False, True):
        model = open_model(tiny("qwen3"), device)
        if not ahead:
            model.feed = None
        found.append(generate(model, random.Random(20)))
    different = sum(one != other for one, other in zip(*found, strict=True))
    assert different <= (device != "cpu")


def test_the_sanitized_steps_run() -> None:
    sanitized_steps.run("cpu", families=("llama",))


@pytest.mark.gpu
def test_no_kernel_leaves_its_memory() -> None:
    """Under compute-sanitizer, which comes with CUDA's toolkit."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m"]
    ran = subprocess.run(
        [*command, "tests.fused_decode.sanitized_steps", "cuda:0"],
        cwd=PROJECT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    report = ran.stdout + ran.stderr
    assert ran.returncode == 0 and sanitized_steps.ENDED in report, report[-4000:]
