"""Loads over many adapters: lengths of the Azure trace, ranks by a power law, Poisson arrivals (Chameleon, 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.common.public_data import data_file
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.simulate.adapter_cache import SimulatedRequest
from shapeshift.workloads import trace

RANKS = (8, 16, 32, 64, 128)
ADAPTERS = 100
TRACE = "azure_llm_2023/conv.csv"
POWER = 1.0
"""The k-th smallest rank is requested in proportion to k to the minus POWER; adapters of a rank are equally likely."""


def adapter_set(bytes_per_rank: int, count: int = ADAPTERS) -> dict[str, AdapterInfo]:
    """`count` adapters by name, equally many of each rank."""
    pairs = [(rank, number) for rank in RANKS for number in range(count // len(RANKS))]
    return {
        f"r{rank}-{number:02}": AdapterInfo(f"r{rank}-{number:02}", rank, rank * bytes_per_rank)
        for rank, number in pairs
    }


@dataclass(frozen=True)
class Lengths:
    """The lengths of a trace's requests, scaled. prompts, answers: INT64 [n]."""

    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]

    @classmethod
    def read(cls, scale: float = 1.0, longest: int = 10**9) -> Lengths:
        """Every request's tokens times `scale`, at least 1 each. longest: most tokens of prompt and answer in all."""
        requests = trace.read(data_file(TRACE))
        prompts = np.maximum(1, np.rint(requests.length * scale)).astype(np.int64)
        answers = np.maximum(1, np.rint(requests.extra["generated"].astype(float) * scale)).astype(np.int64)
        answers = np.minimum(answers, longest // 2)
        return cls(np.minimum(prompts, longest - answers), answers)


def names(adapters: Mapping[str, AdapterInfo], count: int, rng: np.random.Generator) -> list[str]:
    """The adapters of `count` requests, drawn by the power law of ranks."""
    ranks = sorted({adapter.rank for adapter in adapters.values()})
    shares = (np.arange(len(ranks)) + 1.0) ** -POWER
    chosen = rng.choice(len(ranks), count, p=shares / shares.sum())
    of_rank = [sorted(name for name, adapter in adapters.items() if adapter.rank == rank) for rank in ranks]
    return [of_rank[at][rng.integers(len(of_rank[at]))] for at in chosen]


def draw(
    lengths: Lengths, adapters: Mapping[str, AdapterInfo], rate: float, count: int, rng: np.random.Generator
) -> list[SimulatedRequest]:
    """`count` requests, Poisson arrivals of `rate` a second."""
    instants = np.cumsum(rng.exponential(1 / rate, count))
    rows = rng.integers(0, len(lengths.prompts), count)
    chosen = names(adapters, count, rng)
    columns = zip(
        instants.tolist(), chosen, lengths.prompts[rows].tolist(), lengths.answers[rows].tolist(), strict=True
    )
    return [SimulatedRequest(*one) for one in columns]
