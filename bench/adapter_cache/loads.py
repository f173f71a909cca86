"""Loads over many adapters: lengths of the Azure trace, ranks by a power law, Poisson arrivals (Chameleon, 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.common.public_data import data_file
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.simulate.adapter_cache import SimulatedRequest
from shapeshift.workloads import adapters, trace

ADAPTERS = 100
TRACE = "azure_llm_2023/conv.csv"


def adapter_set(bytes_per_rank: int, count: int = ADAPTERS) -> dict[str, AdapterInfo]:
    """`count` adapters by name, equally many of each rank."""
    return {name: AdapterInfo(name, rank, rank * bytes_per_rank) for name, rank in adapters.ranks(count).items()}


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
        answers = np.maximum(1, np.rint(requests.output_length * scale)).astype(np.int64)
        answers = np.minimum(answers, longest // 2)
        return cls(np.minimum(prompts, longest - answers), answers)


def draw(
    lengths: Lengths, num_adapters: int, rate: float, count: int, rng: np.random.Generator
) -> list[SimulatedRequest]:
    """`count` requests to so many adapters, Poisson arrivals of `rate` a second."""
    instants = np.cumsum(rng.exponential(1 / rate, count))
    rows = rng.integers(0, len(lengths.prompts), count)
    chosen = adapters.names(num_adapters, count, rng)
    columns = zip(
        instants.tolist(), chosen, lengths.prompts[rows].tolist(), lengths.answers[rows].tolist(), strict=True
    )
    return [SimulatedRequest(*one) for one in columns]
