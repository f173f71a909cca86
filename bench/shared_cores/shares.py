"""What two busy models get of one machine, against each one's half of what it reaches alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Busy = tuple[str, ...]
"""The models that are busy at once, in the order of the command line."""


@dataclass(frozen=True)
class Cell:
    """One load of one round.

    rates    answers a second of each busy model while all of them are busy
    answers  of each busy model, with those before and after that time
    cpu_s    processor time of server and client for these answers
    foreign  cores that other processes used
    """

    rates: Mapping[str, float]
    answers: Mapping[str, int]
    cpu_s: float
    foreign: float


Round = Mapping[Busy, Cell]


def loads(models: Sequence[str]) -> list[Busy]:
    """Each model alone, then each two."""
    return [*((model,) for model in models), *itertools.combinations(models, 2)]


@dataclass(frozen=True)
class PairShare:
    """Two busy models; medians over the rounds, whose loads alone and together are compared within a round.

    rates     answers a second, by model
    shares    the rate of each over half of its rate alone
    together  the mean of both shares: median, least, most. 1: together they get as much done as taking turns
    per_cpu   the same for processor time: what the answers would have cost alone, over what they cost. Other load on
              the machine, which distorts rates, hardly changes it
    """

    models: Busy
    rates: Mapping[str, float]
    shares: Mapping[str, float]
    together: tuple[float, float, float]
    per_cpu: float


def pair_shares(rounds: Sequence[Round]) -> list[PairShare]:
    """The shares of each pair that was measured in all `rounds`."""
    return [_pair(pair, rounds) for pair in rounds[0] if len(pair) == 2]


def _pair(pair: Busy, rounds: Sequence[Round]) -> PairShare:
    shares = {
        model: np.array([cells[pair].rates[model] / (cells[(model,)].rates[model] / 2) for cells in rounds])
        for model in pair
    }
    both = np.mean(list(shares.values()), axis=0)
    return PairShare(
        pair,
        {model: float(np.median([cells[pair].rates[model] for cells in rounds])) for model in pair},
        {model: float(np.median(own)) for model, own in shares.items()},
        (float(np.median(both)), float(both.min()), float(both.max())),
        float(np.median([_alone_s(pair, cells) / cells[pair].cpu_s for cells in rounds])),
    )


def _alone_s(pair: Busy, cells: Round) -> float:
    """The processor time that the answers of a pair would have cost alone, in seconds."""
    alone = {model: cells[(model,)].cpu_s / cells[(model,)].answers[model] for model in pair}
    return sum(cells[pair].answers[model] * alone[model] for model in pair)


def table(rounds: Sequence[Round]) -> str:
    """The rates alone, then each pair."""
    lines = [f"{'alone':<20}{'answers/s':>10}{'CPU ms':>8}"]
    for (model,) in (busy for busy in rounds[0] if len(busy) == 1):
        cells = [one[(model,)] for one in rounds]
        rate = np.median([cell.rates[model] for cell in cells])
        cost = np.median([1e3 * cell.cpu_s / cell.answers[model] for cell in cells])
        lines.append(f"{model:<20}{rate:10.1f}{cost:8.1f}")
    lines += ["", f"{'both busy':<20}{'answers/s':>10}{'share':>7}{'both':>7}{'least':>7}{'most':>7}{'of CPU':>8}"]
    for pair in pair_shares(rounds):
        for model in pair.models:
            line = f"{model:<20}{pair.rates[model]:10.1f}{pair.shares[model]:7.2f}"
            if model == pair.models[-1]:
                line += "".join(f"{value:7.2f}" for value in pair.together) + f"{pair.per_cpu:8.2f}"
            lines.append(line)
    foreign = [cell.foreign for cells in rounds for cell in cells.values()]
    return "\n".join(
        [
            *lines,
            "",
            "CPU ms: processor time of server and client for an answer. share: a model's rate over half of its rate",
            f"alone; both: the mean of two shares (median, least and most of {len(rounds)} rounds); of CPU: the",
            "processor time that the answers of both would have cost alone, over what they cost together. Other",
            f"processes used {np.median(foreign):.2f} cores (median; most {max(foreign):.2f}).",
        ]
    )
