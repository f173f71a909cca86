"""The first token at 80% load over many adapters: Chameleon's trace over the times that this device takes.

Steps of a 7B shape (one row, all rows, a chunk of a prompt, adapters) and the copy of an adapter from pinned memory are
measured. They give the law of iteration times of the simulated decode loop (`bench.adapter_cache.simulated`), which
then serves the trace in each system's order. The times are the device's; the queues are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.adapter_cache import report
from bench.adapter_cache.loads import Lengths, adapter_set
from bench.adapter_cache.report import CACHE, DEFAULT, PLAIN, QUEUES
from bench.adapter_cache.simulated import PARTS, Regime
from bench.gpu.adapters import RANKS, adapter_hook, owners
from bench.gpu.decode import SEVEN_BILLION, TINY, step, step_of
from bench.gpu.device import Device
from bench.gpu.memory import adapter_elements, copies
from bench.gpu.part import Part, Row, ratio
from bench.gpu.random_models import Shape, architecture_of, decoder
from shapeshift.engines import gpu
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.tensor_layout import weight_bytes
from shapeshift.simulate.adapter_cache import Machine

LOAD = 0.8
_SYSTEMS = {"S-LoRA's order": PLAIN, "its order, cache": CACHE, "default": DEFAULT, "Chameleon's queues": QUEUES}
# Of the device's memory, for weights, keys, values and adapters; activations and graphs have the rest.
_USABLE = 0.9
# A rehearsal has no device whose memory it could fill: this many of the longest requests fit.
_REHEARSED = 8
# A law without a time of its own would serve infinitely many requests.
_LEAST_S = 1e-6
_ADAPTER_RANK = max(RANKS)
# A cache holds at most this share of the bytes of all adapters, as in `bench.adapter_cache.simulated`.
_CACHED = 0.4


@dataclass(frozen=True)
class Sizes:
    """rows: that decode in a step, the slots of the loop; context: tokens of each before it; chunk: tokens of a prompt
    beside them; scale, longest: of the trace's lengths; requests: of each run; seeds: runs of each system."""

    shape: Shape
    rows: int
    context: int
    chunk: int
    rounds: int
    scale: float
    longest: int
    requests: int
    seeds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    regime = _regime(device, sizes, seed)
    machine = regime.machine
    yield {
        "constant, ms": round(machine.base_s * 1e3, 3),
        "a row, us": round(machine.row_s * 1e6, 2),
        "a prompt token, us": round(machine.token_s * 1e6, 2),
        "a rank of a row, us": round(machine.rank_s * 1e6, 3),
        "adapters, GB/s": round(machine.load_bytes_s / 1e9, 2),
        "memory for keys, values and adapters, MiB": machine.pool_bytes >> 20,
    }
    rate = LOAD * regime.capacity(sizes.requests)
    first: dict[str, float] = {}
    for name, system in _SYSTEMS.items():
        runs = [regime.replay(PARTS[system], rate, sizes.requests, seed + turn) for turn in range(sizes.seeds)]
        first[name] = report.first_ms(runs, 99)
        row = {"system": name, "requests/s": round(rate, 2), "first token p99, ms": round(first[name], 1)}
        theirs = next(iter(first.values()))
        loaded = {"MiB loaded a request": round(report.record(runs)["mb_per_request"], 1)}
        yield row | {"S-LoRA's order / it": ratio(theirs, first[name])} | loaded


def _regime(device: Device, sizes: Sizes, seed: int) -> Regime:
    architecture = architecture_of(sizes.shape)
    elements = adapter_elements(architecture, _ADAPTER_RANK)
    load_s = copies(device, elements, sizes.rounds, seed)["pinned"] / 1e3
    adapter_bytes = elements * device.dtype.itemsize
    adapters = adapter_set(adapter_bytes // _ADAPTER_RANK)
    token_bytes = 2 * architecture.layers * architecture.kv_width * device.dtype.itemsize
    largest = max(adapter.bytes for adapter in adapters.values())
    pool = _pool_bytes(device, architecture, _REHEARSED * (sizes.longest * token_bytes + largest))
    machine = _machine(device, sizes, seed, adapter_bytes / load_s, pool, token_bytes)
    share = min(1.0, _CACHED * sum(adapter.bytes for adapter in adapters.values()) / pool)
    return Regime(f"{sizes.rows} rows", machine, Lengths.read(sizes.scale, sizes.longest), adapters, share)


def _pool_bytes(device: Device, architecture: Architecture, rehearsed: int) -> int:
    if device.number is None:
        return rehearsed
    usable = int(_USABLE * gpu.describe(device.number).memory_mb * 2**20)
    return usable - weight_bytes(architecture, "bf16")


def _machine(
    device: Device, sizes: Sizes, seed: int, load_bytes_s: float, pool_bytes: int, token_bytes: int
) -> Machine:
    """The law of the steps' times, from one step of each kind: a difference of two is what one of them adds."""
    rows = sizes.rows
    model = decoder(sizes.shape, device, rows + 1, max(sizes.context + 1, sizes.chunk), seed)
    model.linear_hook = adapter_hook(model, len(RANKS), device, seed)
    steps = {
        "one": step(model, step_of(1, sizes.context)),
        "rows": step(model, step_of(rows, sizes.context)),
        "chunk": step(model, step_of(rows, sizes.context, chunk=sizes.chunk)),
        "adapters": step(model, step_of(rows, sizes.context, owners(rows, len(RANKS)))),
    }
    times_s = {name: ms / 1e3 for name, ms in device.in_turn(steps, sizes.rounds).items()}
    del steps
    model.linear_hook = None
    del model
    device.free()
    ranks = int(np.resize(RANKS, rows).sum())
    row_s = max(0.0, times_s["rows"] - times_s["one"]) / (rows - 1)
    return Machine(
        slots=rows,
        prefill_tokens=sizes.chunk,
        base_s=max(_LEAST_S, times_s["one"] - row_s),
        row_s=row_s,
        token_s=max(0.0, times_s["chunk"] - times_s["rows"]) / sizes.chunk,
        rank_s=max(0.0, times_s["adapters"] - times_s["rows"]) / ranks,
        load_bytes_s=load_bytes_s,
        pool_bytes=pool_bytes,
        token_bytes=token_bytes,
    )


PART = Part(
    "the first token at 80% load of Chameleon's trace over 7B adapters, by this device's times",
    measure,
    Sizes(SEVEN_BILLION, 32, 512, 256, rounds=10, scale=0.5, longest=2048, requests=1500, seeds=3),
    Sizes(TINY, 4, 24, 9, rounds=1, scale=0.02, longest=64, requests=60, seeds=1),
    minutes=2.0,
)
