"""What adapters add to a decode step of a 7B shape, ours as a graph and without, and PEFT's mixed batch.

Rows take the adapters in turn, of ranks 8 to 64 on queries, keys, values and output of every layer. PEFT runs after
ours, with weights of its own: two copies of 7 billion weights may not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from bench.gpu.decode import SEVEN_BILLION, TINY, step, step_of
from bench.gpu.device import Device, Step
from bench.gpu.part import Part, Row, ratio
from bench.gpu.random_models import Shape, decoder, reference_decoder
from bench.peers.peft_steps import TARGETS, stepper, with_adapters
from shapeshift.adapter_cache.lora import grouped_loading
from shapeshift.adapter_cache.lora.batch import Factor, adaptable_of_decoder, lay_out, shifted, targets
from shapeshift.adapter_cache.lora.grouped import GraphLoraHook
from shapeshift.errors import EngineError
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel

RANKS = (8, 16, 32, 64)
_STD = 0.02


@dataclass(frozen=True)
class Sizes:
    """adapters: how many at once; context: tokens of each text before the step."""

    shape: Shape
    adapters: tuple[int, ...]
    rows: int
    context: int
    rounds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    model = decoder(sizes.shape, device, sizes.rows, sizes.context + 1, seed)
    plain = step_of(sizes.rows, sizes.context)
    for count in sizes.adapters:
        model.linear_hook = adapter_hook(model, count, device, seed)
        mixed = step_of(sizes.rows, sizes.context, owners(sizes.rows, count))
        steps: dict[str, Step] = {
            "none": _with_graphs(model, plain, True),
            "mixed": _with_graphs(model, mixed, True),
            "eager": _with_graphs(model, mixed, False),
        }
        times_ms = device.in_turn(steps, sizes.rounds)
        row = _row("ours", sizes.rows, count, times_ms)
        yield row | {
            "without a graph, ms": round(times_ms["eager"], 3),
            "eager / graph": ratio(times_ms["eager"], times_ms["mixed"]),
        }
        del steps
        model.linear_hook = None
        device.free()
    del model
    device.free()
    for count in sizes.adapters:
        yield _row("PEFT", sizes.rows, count, _peft(device, sizes, count, seed))
        device.free()


def _with_graphs(model: GraphedModel, batch: StepBatch, uses_graphs: bool) -> Step:
    run = step(model, batch)

    def run_step() -> object:
        model.uses_graphs = uses_graphs
        return run()

    return run_step


def _row(system: str, rows: int, count: int, times_ms: dict[str, float]) -> Row:
    none, mixed = times_ms["none"], times_ms["mixed"]
    row = {"system": system, "rows": rows, "adapters": count}
    return row | {"without, ms": round(none, 3), "with, ms": round(mixed, 3), "with / without": ratio(mixed, none)}


def owners(rows: int, count: int) -> torch.Tensor:
    """The adapter of each row: rows take them in turn."""
    return torch.arange(rows, dtype=torch.int32) % count


def factors(architecture: Architecture, rank: int) -> list[Factor]:
    """Those of an adapter of this rank on TARGETS of every layer."""
    places = targets(architecture)
    return [
        Factor(layer, *places[f"self_attn.{name}"], rank, 1.0, "", "")
        for layer in range(architecture.layers)
        for name in TARGETS
    ]


def adapter_hook(model: GraphedModel, count: int, device: Device, seed: int) -> GraphLoraHook:
    """`count` random adapters of RANKS in turn, for rows of `model`."""
    laid = {
        rank: lay_out(adaptable_of_decoder(model.architecture), factors(model.architecture, rank)) for rank in RANKS
    }
    ranks = list(islice(cycle(RANKS), count))
    places, start = [], 0
    for rank in ranks:
        relative, elements = laid[rank]
        places.append(shifted(relative, start))
        start += elements
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    memory = torch.empty(start, dtype=device.dtype, device=device.torch_device).normal_(std=_STD, generator=generator)
    said = list[str]()
    kernels = grouped_loading.load(max(RANKS), memory, said.append)
    if kernels is None:
        raise EngineError("; ".join(said))
    return GraphLoraHook(
        memory,
        lambda numbers: ([places[number] for number in numbers], 0),
        kernels,
        slots=model.slots,
        layers=model.architecture.layers,
    )


def _peft(device: Device, sizes: Sizes, count: int, seed: int) -> dict[str, float]:
    """Milliseconds of steps of transformers without adapters, then of PEFT with a mixed batch over the same weights."""
    base = reference_decoder(sizes.shape, device, seed)
    prompt = torch.randint(9, 500, (sizes.rows, sizes.context), device=device.torch_device)
    times_ms = device.in_turn({"none": stepper(base, prompt)}, sizes.rounds)
    model = with_adapters(base, list(islice(cycle(RANKS), count)))
    names = [str(number) for number in owners(sizes.rows, count).tolist()]
    return times_ms | device.in_turn({"mixed": stepper(model, prompt, adapter_names=names)}, sizes.rounds)


PART = Part(
    "what 8 and 64 adapters add to a decode step of 32 rows, ours and PEFT's",
    measure,
    Sizes(SEVEN_BILLION, (8, 64), rows=32, context=512, rounds=20),
    Sizes(TINY, (2,), rows=3, context=8, rounds=1),
    minutes=4.0,
)
