"""Decode steps of Llama shapes of 1 and 7 billion random weights, as shares of the measured bandwidth.

`decode`: rows that each get a token, over a context. Its least time is that of reading the weights and the context
once, at the bandwidth that a copy reaches in the same run. `gathering` is the same graph with attention in plain torch,
which copies keys and values first. transformers runs after ours: two copies of 7 billion weights may not fit.
`beside a prompt`: such rows beside a chunk of a prompt, of the first model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.device import Device, Step
from bench.gpu.part import Part, Row, ratio
from bench.gpu.random_models import Shape, decoder, gathering, reference_decoder
from shapeshift.fused_decode.interfaces import StepBatch, blocks_of
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from shapeshift.fused_decode.model.tensor_layout import weight_bytes

ONE_BILLION: Shape = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
SEVEN_BILLION: Shape = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
TINY: Shape = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Sizes:
    """models: names and shapes; rows: that decode in a step; context: tokens of each text before it; chunks, long: of a
    prompt, and of the texts, of further steps of the first model."""

    models: tuple[tuple[str, Shape], ...]
    rows: tuple[int, ...]
    context: int
    chunks: tuple[int, ...]
    long: int
    rounds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    bandwidth = device.bandwidth()
    yield {"kind": "bandwidth", "GB/s": round(bandwidth / 1e9, 1)}
    for name, shape in sizes.models:
        model = decoder(shape, device, max(sizes.rows), sizes.context + 1, seed)
        ours = {}
        for rows in sizes.rows:
            row, ours[rows] = _ours(device, model, rows, sizes.context, bandwidth, sizes.rounds)
            yield {"model": name, "kind": "decode"} | row
        del model
        device.free()
        yield from _transformers(device, name, shape, sizes, seed, ours)
        device.free()
    (name, shape), *_ = sizes.models
    rows = sorted(sizes.rows)[len(sizes.rows) // 2]
    model = decoder(shape, device, rows + 1, sizes.long + 1, seed)
    for chunk in sizes.chunks:
        times_ms = _in_turn(device, model, step_of(rows, sizes.context, chunk=chunk), sizes.rounds)
        row = {"rows": rows, "context": sizes.context, "chunk": chunk, **_shown(times_ms)}
        yield {"model": name, "kind": "beside a prompt"} | row
    row, _ = _ours(device, model, rows, sizes.long, bandwidth, sizes.rounds)
    yield {"model": name, "kind": "long texts"} | row


def _ours(
    device: Device, model: GraphedModel, rows: int, context: int, bandwidth: float, rounds: int
) -> tuple[Row, float]:
    """A row of the table, and the milliseconds of our step."""
    times_ms = _in_turn(device, model, step_of(rows, context), rounds)
    least = 1e3 * _bytes(model, device, rows, context) / bandwidth
    row = {"rows": rows, "context": context, **_shown(times_ms)}
    return row | {"of the bound": round(least / times_ms["ours"], 3)}, times_ms["ours"]


def _in_turn(device: Device, model: GraphedModel, batch: StepBatch, rounds: int) -> dict[str, float]:
    return device.in_turn({"ours": step(model, batch), "gathering": step(gathering(model), batch)}, rounds)


def _shown(times_ms: dict[str, float]) -> Row:
    columns = {f"{name}, ms": round(ms, 3) for name, ms in times_ms.items()}
    return columns | {"gathering / ours": ratio(times_ms["gathering"], times_ms["ours"])}


def step_of(rows: int, context: int, adapters: torch.Tensor | None = None, chunk: int = 0) -> StepBatch:
    """Rows that each get a token after `context` tokens and, last, the first `chunk` tokens of a prompt.

    adapters: see `StepBatch`.
    """
    count, each = rows + bool(chunk), blocks_of(max(context + 1, chunk))
    slots = torch.arange(count, dtype=torch.int32)
    starts, lengths = torch.full_like(slots, context), torch.ones_like(slots)
    if chunk:
        starts[-1], lengths[-1] = 0, chunk
    tokens = torch.randint(9, 500, (int(lengths.sum()),))
    blocks = torch.arange(count * each, dtype=torch.int32).view(count, each)
    return StepBatch(tokens, slots, starts, lengths, slots.long(), adapters, blocks=blocks)


def _transformers(
    device: Device, name: str, shape: Shape, sizes: Sizes, seed: int, ours: dict[int, float]
) -> Iterator[Row]:
    """A static cache with torch.compile; and the rows one by one without it, as concurrent instances run them."""
    model = reference_decoder(shape, device, seed)
    for rows in sizes.rows:
        compiled = _ms(device, _static_cache_step(device, model, rows, sizes.context), sizes.rounds)
        row = {"model": name, "kind": "transformers", "rows": rows, "static cache, compiled, ms": round(compiled, 3)}
        yield row | {"static cache, compiled / ours": ratio(compiled, ours[rows])}
    most = max(sizes.rows)
    alone = _ms(device, _static_cache_step(device, model, 1, sizes.context, is_compiled=False), sizes.rounds)
    row = {"model": name, "kind": "transformers", "rows": most, "row by row, ms": round(most * alone, 3)}
    yield row | {"row by row / ours": ratio(most * alone, ours[most])}


def _static_cache_step(device: Device, model: Any, rows: int, context: int, is_compiled: bool = True) -> Step:
    from transformers import StaticCache

    cache: Any = StaticCache(config=model.config, max_cache_len=context + 1)
    # As transformers itself compiles a step over a static cache: CUDA graphs of its own.
    run = device.compiled(model.forward, mode="reduce-overhead") if is_compiled else model.forward
    prompt = torch.randint(9, 500, (rows, context), device=device.torch_device)
    token = prompt[:, :1].contiguous()
    place = torch.full((rows, 1), context, device=device.torch_device)
    with torch.inference_mode():
        model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run_step() -> object:
        with torch.inference_mode():
            answer = run(token, past_key_values=cache, position_ids=place, use_cache=True)
            # The next step has the same context.
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)
            return answer.logits[:, -1].argmax(-1).cpu()

    return run_step


def step(model: GraphedModel, batch: StepBatch) -> Step:
    """A step of ours: the logits, and the most likely token of each row on the CPU."""
    return lambda: model.forward(batch).argmax(-1).cpu()


def _bytes(model: GraphedModel, device: Device, rows: int, context: int) -> float:
    """Bytes that a step must read: the weights, a row of the embedding aside, and the keys and values."""
    a = model.architecture
    table = 0 if a.tied else a.vocab_size * a.hidden * device.dtype.itemsize
    cached = 2 * a.layers * a.kv_width * device.dtype.itemsize
    weights = weight_bytes(a, "f32" if device.number is None else "bf16") - table
    return float(weights + rows * context * cached)


def _ms(device: Device, step: Step, rounds: int) -> float:
    return device.in_turn({"": step}, rounds)[""]


PART = Part(
    "decode steps of 1B and 7B shapes, against the bandwidth and transformers",
    measure,
    Sizes(
        (("1b", ONE_BILLION), ("7b", SEVEN_BILLION)),
        (1, 8, 32),
        context=512,
        chunks=(64, 256),
        long=4000,
        rounds=30,
    ),
    Sizes((("tiny", TINY),), (2,), context=24, chunks=(9,), long=90, rounds=1),
    minutes=8.0,
)
