"""The physical bound of decoding: the best rates of matrix products and of reading memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shapeshift.engines.hardware import cores
from shapeshift.fused_decode.settings import COMPUTED_BYTES, QUANTISED, WEIGHT_BITS, computed

_READ = 24 << 20
"""Numbers that each core reads to measure memory bandwidth: far more than any cache holds."""


@dataclass(frozen=True)
class Machine:
    """Measured rates with all cores: FLOP/s of matrix products, bytes/s of reading."""

    flops: float
    read: float

    def best_of(self, other: Machine) -> Machine:
        """The higher of both measurements, rate by rate."""
        return Machine(max(self.flops, other.flops), max(self.read, other.read))


def measure(precision: str, seconds: float = 1.5) -> Machine:
    """The best rates within `seconds` each. Those of 8-bit integers, which torch computes slowly, are taken for twice
    those of the activations' type: AMX and AVX512 multiply twice as many in an instruction as of bf16."""
    number = computed(precision)
    flops = matrix_flops(number, seconds)
    return Machine(2 * flops if precision in QUANTISED else flops, read_rate(seconds))


def matrix_flops(precision: str, seconds: float, size: int = 1024) -> float:
    """FLOP/s of a `size` x `size` matrix product, by torch and, where it has packed linears, by oneDNN with them."""
    import torch

    from shapeshift.fused_decode.model.torch_operations import PackedLinear, packs

    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    rows, weight = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
    least_s = _best(lambda: torch.mm(rows, weight), seconds)
    if packs(kind):
        linear = PackedLinear(weight, None)
        least_s = min(least_s, _best(lambda: linear(rows), seconds))
    return 2.0 * size**3 / least_s


def read_rate(seconds: float) -> float:
    """Bytes a second that all cores read in parallel."""
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
    """A decoder's size in numbers.

    linears, head  weights of the layers' linears, and of the output head
    cached         keys and values of a token
    """

    linears: int
    head: int
    cached: int

    @classmethod
    def read(cls, folder: Path) -> Model:
        config = json.loads((folder / "config.json").read_text())
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        head_dim = hidden // config["num_attention_heads"]
        keys = config["num_key_value_heads"] * head_dim
        linears = layers * (2 * hidden * (hidden + keys) + 3 * hidden * inner)
        return cls(linears, config["vocab_size"] * hidden, 2 * layers * keys)


def least_seconds(machine: Machine, model: Model, precision: str, prompt: int, new_tokens: Sequence[int]) -> float:
    """The least time for requests that arrive at once: one batch of all prompts, then a step for each token.

    A step takes the longer of its matrix products and reading all weights once, plus reading its requests' caches.
    new_tokens: tokens of each answer.
    """
    # The head of a quantised model has 8 bits.
    head_bits = max(WEIGHT_BITS[precision], 8)
    weights = (model.linears * WEIGHT_BITS[precision] + model.head * head_bits) / 8
    token_bytes = model.cached * COMPUTED_BYTES[computed(precision)]
    count, read = len(new_tokens), weights / machine.read
    total = max(read, 2 * count * (prompt * model.linears + model.head) / machine.flops)
    for step in range(1, max(new_tokens)):
        rows = sum(1 for count in new_tokens if count > step)
        products = 2 * rows * (model.linears + model.head) / machine.flops
        cached = rows * (prompt + step) * token_bytes / machine.read
        total += max(read, products) + cached
    return total
