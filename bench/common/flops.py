"""The physical bound of encoding: the rate of matrix products, and how many a text needs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path


def gemm_flops(precision: str, seconds: float = 2.0, size: int = 1024) -> float:
    """The best FLOP/s of a `size` x `size` matrix product on all cores, in `precision` (f32 or bf16)."""
    import torch

    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - before)
    return 2.0 * size**3 / best


def encoder_flops(checkpoint: Path, lengths: Sequence[int]) -> float:
    """FLOP to encode one text, the mean over `lengths`: the linear layers, and attention over the length."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    per_token = 2 * (4 * hidden * hidden + 2 * hidden * inner)
    total = sum(layers * (n * per_token + 4 * n * n * hidden) for n in lengths)
    return float(total / len(lengths))
