"""Layers that keep a state for each text: it begins empty, goes on with the text, is counted, and follows beams."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shapeshift.adapter_cache.lora.batch import require_plain_layers
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.engine.sampling import grammar
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.loading import load_runtime
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cpu_runtime import DecodeModel, ModelOptions
from shapeshift.fused_decode.model.kv_cache import block_bytes, cache_bytes
from shapeshift.fused_decode.model.network import DeltaLayer
from shapeshift.fused_decode.model.torch_operations import TorchOperations
from shapeshift.fused_decode.policy.admission import FirstComeFirstServed
from shapeshift.fused_decode.request import Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.fused_decode.settings import FusedDecodeSettings
from tests.fakes import logger
from tests.fused_decode.decode_models import LONGEST, VOCAB, Tiny, batch, texts
from tests.fused_decode.families import make, reference_logits
from tests.fused_decode.test_decode_grammar import Anything
from tests.fused_decode.toy import found_by
from tests.waiting import wait_for

SLOTS = 8


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make("qwen3_5_text", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture
def load(hybrid: Tiny, kernel_cache: Path) -> Callable[..., DecodeModel]:
    def run(folder: Path = hybrid.folder, native: bool = True, blocks: int = 0) -> DecodeModel:
        options = ModelOptions(
            precision="f32",
            slots=SLOTS,
            max_length=LONGEST,
            threads=2,
            cache_dir=kernel_cache,
            native=native,
            blocks=blocks,
        )
        return DecodeModel.load(folder, options, lambda line: None)

    return run


@pytest.mark.parametrize("native", [True, False])
def test_the_last_token_can_be_computed_again(load: Callable[..., DecodeModel], native: bool) -> None:
    """Alone, and before further tokens: as where the mask of the next token was late. With kernels to the last bit."""

    def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.equal(one, other) if native else torch.allclose(one, other, atol=1e-5)

    model, (text,) = load(native=native), texts(1, seed=1, shortest=40)
    for end in (1, 7):
        rest = text[end : end + 5]
        first = model.forward(batch([text[:end]], [2], [0])).clone()
        then = model.forward(batch([rest], [2], [end])).clone()
        model.forward(batch([text[:end]], [3], [0]))
        again = model.forward(batch([text[end - 1 : end]], [3], [end - 1])).clone()
        assert agree(again, first) and agree(again, model.forward(batch([text[end - 1 : end]], [3], [end - 1])))
        assert agree(model.forward(batch([rest], [3], [end])), then)
        model.forward(batch([text[:end]], [4], [0]))
        both = model.forward(batch([text[end - 1 : end + 5]], [4], [end - 1]))
        assert agree(both, then)


def test_a_row_goes_on_from_its_state_alone(load: Callable[..., DecodeModel]) -> None:
    model, (text,) = load(), texts(1, seed=2, shortest=40)
    model.forward(batch([text[:9]], [1], [0]))
    for start in (3, 7, 10):
        with pytest.raises(InvalidInputError, match=rf"starts: got \[{start}\]; 0, or where the states .* end: \[9\]"):
            model.forward(batch([text[start : start + 2]], [1], [start]))
    model.forward(batch([text[9:10]], [1], [9]))


@pytest.mark.parametrize("native", [True, False])
def test_nothing_is_left_of_the_last_text(load: Callable[..., DecodeModel], hybrid: Tiny, native: bool) -> None:
    model, (text,) = load(native=native), texts(1, seed=3, shortest=30)
    assert model.cache.states is not None
    for tensors in (model.cache.states.windows, model.cache.states.states):
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
    logits = model.forward(batch([text], [5], [0]))
    assert (logits[0] - reference_logits(hybrid, text)[-1]).abs().max() < 1e-4


def test_states_are_in_the_memory_bound(load: Callable[..., DecodeModel], hybrid: Tiny) -> None:
    model, architecture = load(), Architecture.read(hybrid.folder)
    states = model.cache.states
    assert states is not None and not model.shares_prefixes
    held = sum(tensor.nbytes for tensors in (states.windows, states.states) for tensor in tensors.values())
    assert held == SLOTS * 2 * 4 * (4 * (2 * 2 * 12 + 4 * 20) + 4 * 12 * 20)
    assert cache_bytes(architecture, SLOTS, LONGEST, "f32") == model.memory.nbytes + held
    # Only the layer with attention has keys and values.
    assert block_bytes(architecture, 4, "auto") == 2 * 2 * 16 * 16 * 4


def request_of(prompt: torch.Tensor, new: int, **fields: object) -> Request:
    params = SamplingParams(max_tokens=new, ignore_eos=True, **fields)  # type: ignore[arg-type]
    return Request("", prompt.numpy().astype(np.int64), params, TextStream([b""] * VOCAB), max_length=LONGEST)


def loop_of(model: DecodeModel) -> DecodeLoop:
    pool = BlockPool(model.blocks, caching=model.shares_prefixes)
    return DecodeLoop(model, FirstComeFirstServed(99), lambda _: None, print, pool=pool, prefill_tokens=24)


def answer(model: DecodeModel, prompt: torch.Tensor, **fields: object) -> list[int]:
    """The tokens of a request that is alone."""
    loop, request = loop_of(model), request_of(prompt, 20, **fields)
    loop.submit(request)
    while not request.is_finished:
        loop.step()
    return request.token_ids


@pytest.mark.parametrize("blocks", [0, 14])
def test_each_answer_is_that_of_its_request_alone(load: Callable[..., DecodeModel], blocks: int) -> None:
    """Several samples of one prompt, others beside them, and requests that are preempted for lack of blocks."""
    model, prompts = load(blocks=blocks), [text[:40] for text in texts(3, seed=6, shortest=40)]
    fields = [{"temperature": 0.0}, *({"temperature": 1.0, "seed": seed} for seed in (1, 2, 3))]
    alone = [answer(load(), prompt, **one) for prompt in prompts for one in fields]
    loop = loop_of(model)
    requests = [request_of(prompt, 20, **one) for prompt in prompts for one in fields]
    for request in requests:
        loop.submit(request)
        loop.step()
    while loop.step():
        loop.check_integrity()
    assert [request.token_ids for request in requests] == alone
    assert (loop.metrics.preemptions.value > 0) == (blocks > 0)


def test_a_token_whose_mask_was_late_is_computed_again(load: Callable[..., DecodeModel]) -> None:
    """The grammar allows everything, so that the answer is that without one; its masks come when the request waits."""
    model, (prompt, other) = load(), texts(2, seed=12, shortest=40)
    expected = answer(model, prompt[:30], temperature=0.0)
    gates = {place: threading.Event() for place in (1, 2, 9)}
    slow, mate = request_of(prompt[:30], 20, temperature=0.0), request_of(other[:20], 60, temperature=0.0)
    every = bytes([255] * (VOCAB // 8 + 1))
    slow.grammar = grammar.Grammar(grammar.Template(Anything(gates, every), every), grammar.MaskThreads(), lambda: None)
    loop = loop_of(model)
    loop.submit(slow)
    loop.submit(mate)
    for place, gate in gates.items():
        while slow.generated < place:
            wait_for(lambda: slow.grammar.is_ready)
            loop.step()
        for _ in range(4):
            loop.step()
            loop.check_integrity()
        assert slow.generated == place
        gate.set()
        wait_for(lambda: slow.grammar.is_ready)
    while not slow.is_finished:
        loop.step()
    assert slow.error is None and slow.token_ids == expected


@pytest.mark.parametrize("blocks", [0, 13])
def test_beams_are_those_of_transformers(load: Callable[..., DecodeModel], hybrid: Tiny, blocks: int) -> None:
    prompts = torch.stack([text[:20] for text in texts(4, seed=8)])
    options = {"max_new_tokens": 14, "do_sample": False, "num_beams": 4, "num_return_sequences": 4}
    made = hybrid.reference.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    loop = loop_of(load(blocks=blocks))
    requests = [request_of(prompt, 14, num_beams=4, num_return_sequences=4) for prompt in prompts]
    for request in requests:
        loop.submit(request)
    while loop.step():
        loop.check_integrity()
    assert (loop.metrics.preemptions.value > 0) == (blocks > 0)
    rows = zip(made.sequences[:, 20:].tolist(), made.sequences_scores.tolist(), strict=True)
    for (tokens, score), (theirs, their_score) in zip(
        (found for request in requests for found in found_by(request)), rows, strict=True
    ):
        assert score == pytest.approx(their_score, rel=1e-4)
        assert tokens == theirs or abs(score - their_score) < 2e-6


def test_experts_may_be_in_one_tensor(
    load: Callable[..., DecodeModel], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As in published files of the mixture; transformers writes a tensor for each."""
    folder = make("qwen3_5_moe_text", tmp_path_factory.mktemp("mixture")).folder
    (text,) = texts(1, seed=9, shortest=40)
    expected = load(folder).forward(batch([text], [0], [0])).clone()
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = [
            [tensors.pop(f"{prefix}{number}.{name}_proj.weight") for number in range(6)]
            for name in ("gate", "up", "down")
        ]
        gate, up, down = (torch.stack(part) for part in parts)
        tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert torch.equal(load(tmp_path).forward(batch([text], [0], [0])), expected)


def test_what_cannot_be_served_is_refused(hybrid: Tiny, kernel_cache: Path) -> None:
    def start(**changes: object) -> None:
        stated = {"checkpoint": str(hybrid.folder), "precision": "f32", "max_length": 64, **changes}
        load_runtime(hybrid.folder, FusedDecodeSettings(**stated), kernel_cache, "cpu", logger([]))  # type: ignore[arg-type]

    with pytest.raises(InvalidInputError, match="num_speculative_tokens: got 3; 0: what the states of a qwen3_5_text"):
        start(num_speculative_tokens=3)
    with pytest.raises(InvalidInputError, match="tensor_parallel_size: got 2; 1 for qwen3_5_text: its layers are not"):
        start(tensor_parallel_size=2)
    with pytest.raises(InvalidInputError, match=r"max_concurrency: got 4000; at most \d+ with max_length 64"):
        start(max_concurrency=4000, memory_mb=50)
    with pytest.raises(InvalidInputError, match="model_type: got 'qwen3_5_text'; a base model of adapters whose"):
        require_plain_layers(Architecture.read(hybrid.folder))


def test_a_step_that_kernels_cannot_read_is_refused(load: Callable[..., DecodeModel]) -> None:
    model, runs = load(), torch.tensor([[0, 0, 0, 2, 0]], dtype=torch.int32)
    layer = model.network.layers[0].attention
    inputs, shares = torch.zeros(2, 2 * 2 * 12 + 2 * 80), torch.zeros(2, 8)
    model.operations.delta_net(inputs, shares, layer, runs)  # type: ignore[arg-type]
    for changed, says in (
        ([[8, 0, 0, 2, 0]], "lies outside"),
        ([[0, 0, 1, 1, 0]], "lies outside"),
        ([[0, 0, 0, 1, 0]], "all tokens of inputs"),
    ):
        with pytest.raises(RuntimeError, match=says):
            model.operations.delta_net(inputs, shares, layer, torch.tensor(changed, dtype=torch.int32))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"inputs: must be \[tokens"):
        model.operations.delta_net(inputs[:, 1:].contiguous(), shares, layer, runs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 20, 84])
def test_kernels_compute_what_plain_torch_does(kernel_cache: Path, dtype: torch.dtype, width: int) -> None:
    """Heads whose columns fill vectors, and others; a text that begins, one that goes on, and one that is replayed."""
    native = native_operations.load(kernel_cache, print)
    assert native is not None
    chance = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=chance)

    key_heads, heads, depth, kernel, tokens = 2, 6, 12, 4, 9
    channels, values = 2 * key_heads * depth + heads * width, heads * width
    inputs, shares = normal(tokens, channels + values).to(dtype), normal(tokens, 2 * heads)
    weight, decay, bias, norm = normal(kernel, channels), -normal(heads).exp(), normal(heads), normal(width)
    window, state = normal(3, kernel, channels), normal(3, heads, depth, width)
    runs = torch.tensor([[2, 0, 0, 5, 0], [0, 7, 5, 1, 0], [1, 3, 6, 3, 1]], dtype=torch.int32)
    outs, ends = [], []
    for operations in (TorchOperations(), native):
        layer = DeltaLayer(
            torch.nn.Identity(), weight, decay, bias, norm, 1e-3, window=window.clone(), state=state.clone()
        )
        outs.append(operations.delta_net(inputs, shares, layer, runs).float())
        ends.append(layer.state)
    assert torch.allclose(outs[1], outs[0], atol=1e-4 if dtype == torch.float32 else 0.05, rtol=1e-2)
    assert torch.allclose(ends[1], ends[0], atol=1e-4)


def test_keys_and_values_may_be_levels(hybrid: Tiny, kernel_cache: Path) -> None:
    (text,) = texts(1, seed=13, shortest=40)
    options = ModelOptions(
        precision="int8", kv_precision="int8", slots=2, max_length=LONGEST, threads=1, cache_dir=kernel_cache
    )
    logits = DecodeModel.load(hybrid.folder, options, lambda line: None).forward(batch([text], [1], [0]))[0]
    assert torch.cosine_similarity(logits, reference_logits(hybrid, text)[-1], dim=0) > 0.99


def test_a_batch_may_come_again(load: Callable[..., DecodeModel]) -> None:
    """As the loop gives it where nothing changes: the same object, a token further."""
    model, (text,) = load(), texts(1, seed=11, shortest=30)
    model.forward(batch([text[:10]], [0], [0]))
    model.forward(batch([text[:10]], [1], [0]))
    step: StepBatch = batch([text[10:11]], [0], [10])
    for place in range(10, 14):
        step.tokens[0], step.starts[0] = text[place], place
        again = dataclasses.replace(step, slots=torch.tensor([1], dtype=torch.int32), starts=step.starts.clone())
        assert torch.equal(model.forward(step).clone(), model.forward(again))
