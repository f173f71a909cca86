"""What predicted answer lengths change where chats without an adapter run beside the adapters' short answers.

The requests are answers of SmolLM2 that its predictor was not trained on (checkpoints/smollm2-adapters/lengths.tsv).
The base is requested most often, the adapters by a power law. The simulated machine has the step times of the demo
`generate_lora` on two cores of an AMD EPYC (Zen 5), bf16.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.adapter_cache import report
from bench.adapter_cache.simulated import scheduled
from shapeshift.adapter_cache.policy.length_prediction import LengthPredictor, Oracle, PredictionInput, RunningMean
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.simulate.adapter_cache import Machine, SimulatedRequest, run
from shapeshift.simulate.adapter_pool import CacheOptions

ANSWERS = Path("checkpoints/smollm2-adapters/lengths.tsv")
RANKS = {"intent": 64, "sentiment": 8, "domain": 4, "booking": 32, "clock": 16, "module": 8}
NAMES = ("", *RANKS)
"""The k-th is requested in proportion to 1/k; the base is the first."""
LOADS = (0.7, 0.85, 0.95)
"""Shares of the capacity of `fifo`."""
_TOKEN_BYTES = 23040
_ADAPTER_BYTES = 10**6
DEMO = Machine(
    slots=32,
    prefill_tokens=256,
    base_s=0.006,
    row_s=0.00024,
    token_s=0.00023,
    rank_s=2e-7,
    load_bytes_s=1e9,
    pool_bytes=8192 * _TOKEN_BYTES + 2**24,
    token_bytes=_TOKEN_BYTES,
    slot_tokens=16,
)
MACHINES = {
    "the demo": DEMO,
    "2,048 tokens of KV cache": replace(DEMO, pool_bytes=2048 * _TOKEN_BYTES + 2**24),
}


@dataclass(frozen=True)
class Chat:
    """An answer. predicted: its tokens, by the trained predictor."""

    request: SimulatedRequest
    predicted: int


class Listed(LengthPredictor):
    """The predictions of requests in their order of arrival."""

    def __init__(self, chats: Sequence[Chat]) -> None:
        self._lengths = iter([chat.predicted for chat in chats])

    def predict(self, request: PredictionInput) -> int:
        return min(next(self._lengths), request.max_new_tokens)

    def learn(self, request: PredictionInput, generated: int) -> None:
        """Nothing to learn."""


def read(file: Path = ANSWERS) -> dict[str, list[Chat]]:
    """The answers by the name of the adapter, empty for the base."""
    chats: dict[str, list[Chat]] = {name: [] for name in NAMES}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            name = row["adapter"]
            request = SimulatedRequest(0.0, name or None, int(row["prompt"]), int(row["answer"]))
            chats[name].append(Chat(request, int(row["predicted"])))
    return chats


def draw(chats: dict[str, list[Chat]], rate: float, count: int, seed: int) -> list[Chat]:
    """Poisson arrivals of `count` requests, `rate` a second."""
    rng = np.random.default_rng(seed)
    shares = 1 / (np.arange(len(NAMES)) + 1.0)
    drawn = [chats[NAMES[at]] for at in rng.choice(len(NAMES), count, p=shares / shares.sum())]
    instants = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    chosen = [of_name[rng.integers(len(of_name))] for of_name in drawn]
    return [replace(chat, request=replace(chat.request, at_s=at)) for chat, at in zip(chosen, instants, strict=True)]


def first_s(machine: Machine, scheduler: str, predictor: LengthPredictor, chats: Sequence[Chat]) -> NDArray[np.float64]:
    """Seconds to the first token of each request."""
    adapters = {name: AdapterInfo(name, rank, _ADAPTER_BYTES) for name, rank in RANKS.items()}
    requests = [chat.request for chat in chats]
    return run(machine, adapters, requests, scheduled(scheduler), CacheOptions(), predictor).first_s


def measure(draws: int, count: int) -> dict[str, list[dict[str, str | float]]]:
    """Rows by machine: the time to the first token over that of `arrival`, which predicts nothing."""
    chats = read()
    tables = {}
    for name, machine in MACHINES.items():
        burst = draw(chats, 1e6, count, 10**6)
        capacity = count / float(first_s(machine, "fifo", RunningMean(), burst).max())
        rows: list[dict[str, str | float]] = []
        for load in LOADS:
            drawn = [draw(chats, capacity * load, count, seed) for seed in range(draws)]
            base = [first_s(machine, "arrival", RunningMean(), one) for one in drawn]
            rows += [
                {"load": load, "scheduler": scheduler, **_compared(machine, scheduler, drawn, base)}
                for scheduler in ("sjf", "chameleon")
            ]
        tables[name] = rows
    return tables


def _compared(
    machine: Machine, scheduler: str, drawn: Sequence[Sequence[Chat]], base: Sequence[NDArray[np.float64]]
) -> dict[str, str]:
    """For each predictor the ratio of the 99th percentiles, with its interval, and that of the means."""
    cells = {}
    for name in ("mean", "words", "right"):
        ours = [first_s(machine, scheduler, _predictor(name, chats), chats) for chats in drawn]
        pairs = [(one[len(one) // 10 :], other[len(other) // 10 :]) for one, other in zip(ours, base, strict=True)]
        p99 = report.geometric_mean(np.array([np.percentile(a, 99) / np.percentile(b, 99) for a, b in pairs]))
        mean = report.geometric_mean(np.array([a.mean() / b.mean() for a, b in pairs]))
        cells[f"{name}: p99"] = "{:.2f} ({:.2f} to {:.2f})".format(*p99)
        cells[f"{name}: mean"] = f"{mean[0]:.2f}"
    return cells


def _predictor(name: str, chats: Sequence[Chat]) -> LengthPredictor:
    """Of the adapters' means, of the words, or of the answers themselves."""
    if name == "words":
        return Listed(chats)
    return RunningMean() if name == "mean" else Oracle(1.0)
