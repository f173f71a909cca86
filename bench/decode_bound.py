"""The physical bound of decoding: matrices at the cores' best rate, weights and caches at the memory's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import bound
from shapeshift.engines.hardware import cores

BYTES = {"f32": 4, "bf16": 2}
_READ = 24 << 20
"""Numbers that each core reads in a measurement of the memory, well beyond any cache."""


@dataclass(frozen=True)
class Machine:
    """Measured: FLOP/s of matrix products, bytes/s of reading, both with all cores."""

    flops: float
    read: float

    def better(self, other: Machine) -> Machine:
        """The better of both measurements, rate by rate."""
        return Machine(max(self.flops, other.flops), max(self.read, other.read))


def measure(precision: str, seconds: float = 1.5) -> Machine:
    """The best rates seen within `seconds` each."""
    return Machine(max(bound.gemm_flops(precision, seconds), packed_flops(precision, seconds)), read_rate(seconds))


def packed_flops(precision: str, seconds: float, size: int = 1024) -> float:
    """As `bound.gemm_flops`, by oneDNN with packed weights; 0 where this torch has no such linears."""
    import torch

    from shapeshift.fused_decode.linear import PackedLinear, packs

    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    if not packs(kind):
        return 0.0
    rows, linear = torch.randn(size, size).to(kind), PackedLinear(torch.randn(size, size).to(kind), None)
    return 2.0 * size**3 / _best(lambda: linear(rows), seconds)


def read_rate(seconds: float) -> float:
    """Bytes a second that all cores read together."""
    arrays = [np.ones(_READ, np.float32) for _ in range(cores())]
    with ThreadPoolExecutor(len(arrays)) as pool:
        return sum(array.nbytes for array in arrays) / _best(lambda: list(pool.map(_read, arrays)), seconds)


def _read(array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    return float(np.dot(array, array))


def _best(run: Callable[[], object], seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return best


@dataclass(frozen=True)
class Model:
    """A decoder's size: weights of its linears with and without the head, and of a token's keys and values."""

    linears: int
    head: int
    cached: int

    @classmethod
    def read(cls, folder: Path) -> Model:
        config = json.loads((folder / "config.json").read_text())
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        keys = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
        linears = layers * (2 * hidden * (hidden + keys) + 3 * hidden * inner)
        return cls(linears, config["vocab_size"] * hidden, 2 * layers * keys)


def seconds(machine: Machine, model: Model, precision: str, prompt: int, wanted: Sequence[int]) -> float:
    """The least time for requests that come at once: prompts read in one batch, then a step for each token.

    A step takes as long as its matrix products, or as reading all weights once if that is longer, and then as
    reading the caches of its requests.
    """
    width = BYTES[precision]
    count, read = len(wanted), (model.linears + model.head) * width / machine.read
    total = max(read, 2 * count * (prompt * model.linears + model.head) / machine.flops)
    for step in range(1, max(wanted)):
        rows = sum(1 for new in wanted if new > step)
        computed = 2 * rows * (model.linears + model.head) / machine.flops
        cached = rows * (prompt + step) * model.cached * width / machine.read
        total += max(read, computed) + cached
    return total
