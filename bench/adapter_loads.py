"""Loads over many adapters: lengths of the Azure trace, ranks by a power law, Poisson arrivals (Chameleon, 5.1)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shapeshift.adapter_cache.interfaces import AdapterInfo
from shapeshift.errors import UnsupportedError
from shapeshift.simulate.adapter_cache import Ask
from shapeshift.workloads import trace

RANKS = (8, 16, 32, 64, 128)
ADAPTERS = 100
TRACE = "azure_llm_2023/conv.csv"
POWER = 1.0
"""The k-th smallest rank is asked for in proportion to k to the minus this; within a rank all adapters alike."""


def data_folder() -> Path:
    """Where the public data lies. Raises UnsupportedError naming the variable that says where."""
    folder = Path(os.environ.get("SHAPESHIFT_DATA", "../shared/data"))
    if not (folder / TRACE).is_file():
        raise UnsupportedError(f"no {folder / TRACE}: set SHAPESHIFT_DATA to a folder that holds it")
    return folder


def adapters(bytes_per_rank: int, count: int = ADAPTERS) -> dict[str, AdapterInfo]:
    """`count` adapters by name, equally many of each rank."""
    made = [(rank, number) for rank in RANKS for number in range(count // len(RANKS))]
    return {
        f"r{rank}-{number:02}": AdapterInfo(f"r{rank}-{number:02}", rank, rank * bytes_per_rank)
        for rank, number in made
    }


@dataclass(frozen=True)
class Lengths:
    """The lengths of a trace's requests, scaled. prompts, answers: INT64 [n]."""

    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]

    @classmethod
    def read(cls, scale: float = 1.0, longest: int = 10**9) -> Lengths:
        """Every request's tokens times `scale`, at least one each; `longest`: of prompt and answer together."""
        read = trace.read(data_folder() / TRACE)
        prompts = np.maximum(1, np.rint(read.length * scale)).astype(np.int64)
        answers = np.maximum(1, np.rint(read.extra["generated"].astype(float) * scale)).astype(np.int64)
        answers = np.minimum(answers, longest // 2)
        return cls(np.minimum(prompts, longest - answers), answers)


def names(known: Mapping[str, AdapterInfo], count: int, rng: np.random.Generator) -> list[str]:
    """`count` adapters as they are asked for."""
    ranks = sorted({one.rank for one in known.values()})
    shares = (np.arange(len(ranks)) + 1.0) ** -POWER
    chosen = rng.choice(len(ranks), count, p=shares / shares.sum())
    of_rank = [sorted(name for name, one in known.items() if one.rank == rank) for rank in ranks]
    return [of_rank[at][rng.integers(len(of_rank[at]))] for at in chosen]


def draw(
    lengths: Lengths, known: Mapping[str, AdapterInfo], rate: float, count: int, rng: np.random.Generator
) -> list[Ask]:
    """`count` requests, `rate` a second on average."""
    instants = np.cumsum(rng.exponential(1 / rate, count))
    rows = rng.integers(0, len(lengths.prompts), count)
    chosen = names(known, count, rng)
    columns = zip(
        instants.tolist(), chosen, lengths.prompts[rows].tolist(), lengths.answers[rows].tolist(), strict=True
    )
    return [Ask(*one) for one in columns]
