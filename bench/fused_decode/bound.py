"""The physical bound of decoding: the best rates of matrix products and of reading memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.common.flops import gemm_flops
from shapeshift.engines.hardware import cores
from shapeshift.fused_decode.model.precision import COMPUTED_BYTES, QUANTISED, WEIGHT_BITS, computed, vector_bytes

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
    flops = max(gemm_flops(number, seconds), packed_flops(number, seconds))
    return Machine(2 * flops if precision in QUANTISED else flops, read_rate(seconds))


def packed_flops(precision: str, seconds: float, size: int = 1024) -> float:
    """As `gemm_flops`, by oneDNN with packed weights; 0 where this torch has no packed linears."""
    import torch

    from shapeshift.fused_decode.model.torch_operations import PackedLinear, packs

    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    if not packs(kind):
        return 0.0
    rows, linear = torch.randn(size, size).to(kind), PackedLinear(torch.randn(size, size).to(kind), None)
    return 2.0 * size**3 / _best(lambda: linear(rows), seconds)


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
    head_dim       numbers of one of these vectors
    """

    linears: int
    head: int
    cached: int
    head_dim: int

    @classmethod
    def read(cls, folder: Path) -> Model:
        config = json.loads((folder / "config.json").read_text())
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        head_dim = hidden // config["num_attention_heads"]
        keys = config["num_key_value_heads"] * head_dim
        linears = layers * (2 * hidden * (hidden + keys) + 3 * hidden * inner)
        return cls(linears, config["vocab_size"] * hidden, 2 * layers * keys, head_dim)

    def token_bytes(self, precision: str, kv_precision: str) -> int:
        """Bytes that a token takes in the cache."""
        number = COMPUTED_BYTES[computed(precision)]
        return self.cached // self.head_dim * vector_bytes(self.head_dim, number, kv_precision)


def least_seconds(
    machine: Machine, model: Model, precision: str, prompt: int, new_tokens: Sequence[int], kv_precision: str = "auto"
) -> float:
    """The least time for requests that arrive at once: one batch of all prompts, then a step for each token.

    A step takes the longer of its matrix products and reading all weights once, plus reading its requests' caches.
    new_tokens: tokens of each answer. kv_precision: of the cache, one of `precision.KV_PRECISIONS`.
    """
    # The head of a quantised model has 8 bits.
    head_bits = max(WEIGHT_BITS[precision], 8)
    weights = (model.linears * WEIGHT_BITS[precision] + model.head * head_bits) / 8
    count, read = len(new_tokens), weights / machine.read
    total = max(read, 2 * count * (prompt * model.linears + model.head) / machine.flops)
    for step in range(1, max(new_tokens)):
        rows = sum(1 for count in new_tokens if count > step)
        products = 2 * rows * (model.linears + model.head) / machine.flops
        cached = rows * (prompt + step) * model.token_bytes(precision, kv_precision) / machine.read
        total += max(read, products) + cached
    return total
