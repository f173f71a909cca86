"""Rows that decode beside a chunk of a prompt, of a Llama shape of 1 billion weights, as a graph and without.

`gathering` is a graph whose attention is in plain torch, which copies keys and values first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.gpu.decode import ONE_BILLION, TINY, step, step_of
from bench.gpu.device import Device
from bench.gpu.part import Part, Row, ratio
from bench.gpu.random_models import Shape, decoder, gathering
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel


@dataclass(frozen=True)
class Sizes:
    """rows: that decode; context: tokens of each before the step; chunks: tokens of the prompt beside them."""

    shape: Shape
    rows: tuple[int, ...]
    context: int
    chunks: tuple[int, ...]
    rounds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    longest = max(sizes.context + 1, *sizes.chunks)
    model = decoder(sizes.shape, device, max(sizes.rows) + 1, longest, seed)
    for rows in sizes.rows:
        for chunk in sizes.chunks:
            times_ms = _in_turn(device, model, step_of(rows, sizes.context, chunk=chunk), sizes.rounds)
            row = {"rows": rows, "chunk": chunk} | {f"{name}, ms": round(ms, 3) for name, ms in times_ms.items()}
            yield row | {f"{name} / graph": ratio(times_ms[name], times_ms["graph"]) for name in ("eager", "gathering")}


def _in_turn(device: Device, model: GraphedModel, batch: StepBatch, rounds: int) -> dict[str, float]:
    run, copying = step(model, batch), step(gathering(model), batch)

    def with_graphs(uses_graphs: bool) -> object:
        model.uses_graphs = uses_graphs
        return run()

    variants = {"graph": lambda: with_graphs(True), "eager": lambda: with_graphs(False), "gathering": copying}
    return device.in_turn(variants, rounds)


PART = Part(
    "steps of a 1B shape with a chunk of a prompt, as a graph and without",
    measure,
    Sizes(ONE_BILLION, (8, 32), 512, (64, 128, 256), rounds=20),
    Sizes(TINY, (2,), 24, (9,), rounds=1),
    minutes=2.0,
)
