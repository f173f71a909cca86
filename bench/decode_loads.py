"""Loads of the decode benchmark, and what a system made of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.peers.decode_worker import Ask, Replayed

PROMPT = 32
PAPER_REQUEST_S = 5.8
"""What a request takes alone in the paper (Fig. 5); its intervals are scaled by ours over this."""
PAPER_INTERVAL_MS = 500
PAPER_ITERATIONS = {50: 616, 750: 2239, 1000: 2621, 2000: 5483, 5000: 10694}
PAPER_FASTER = {20: 11.2, 50: 11.1, 100: 10.2, 200: 9.1, 400: 7.1, 750: 4.5, 1000: 4.2, 2000: 2.1, 5000: 1.1}
"""By mean gap in ms, for 32 requests of 512 tokens (the table of Fig. 5, as far as it can be read): iterations until
all are answered, and how many times as fast as concurrent instances."""
PAPER_NEW = 512
SHORTEST, LONGEST = 32, 256


@dataclass(frozen=True)
class Load:
    """Requests under one name; systems that are compared get the same ones."""

    name: str
    asks: list[Ask]

    @property
    def tokens(self) -> int:
        return sum(ask.new for ask in self.asks)


class LoadMaker:
    """Draws loads from a seed: prompts of the tokens `words`, answers of `new` tokens where they are equally long.

    request_s: what one of our requests takes alone.
    """

    def __init__(self, seed: int, words: Sequence[int], new: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._words = np.array(words)
        self._new = new

    def at_once(self, count: int) -> Load:
        """`count` requests at the same instant."""
        return self._load(f"{count} at once", np.zeros(count), self._equal(count))

    def lengths(self, count: int) -> Load:
        """At once, with U(32, 256) tokens each."""
        wanted = self._rng.integers(SHORTEST, LONGEST + 1, count)
        return self._load(f"{count} at once, U({SHORTEST}, {LONGEST}) tokens", np.zeros(count), wanted)

    def constant(self, count: int, request_s: float) -> Load:
        """The paper's constant interval, scaled."""
        gap_s = scaled_s(PAPER_INTERVAL_MS, request_s)
        return self._load(f"one every {gap_s * 1e3:.0f} ms", np.arange(count) * gap_s, self._equal(count))

    def poisson(self, count: int, request_s: float, paper_ms: int) -> Load:
        """Poisson arrivals with one of the paper's mean gaps, scaled."""
        gap_s = scaled_s(paper_ms, request_s)
        gaps = self._rng.exponential(gap_s, count)
        name = f"Poisson, mean gap {gap_s * 1e3:.0f} ms (paper: {paper_ms})"
        return self._load(name, np.cumsum(gaps) - gaps[0], self._equal(count))

    def _equal(self, count: int) -> NDArray[np.int64]:
        return np.full(count, self._new, np.int64)

    def _load(self, name: str, instants: NDArray[np.float64], wanted: NDArray[np.int64]) -> Load:
        prompts = self._rng.choice(self._words, (len(instants), PROMPT)).tolist()
        columns = zip(instants.tolist(), prompts, wanted.tolist(), strict=True)
        return Load(name, [Ask(*one) for one in columns])


def scaled_s(paper_ms: float, request_s: float) -> float:
    """A time of the paper's figures, in proportion to what a request takes here."""
    return paper_ms / 1e3 * request_s / PAPER_REQUEST_S


@dataclass(frozen=True)
class Run:
    """One system under one load. `foreign`: share of the machine that other processes used meanwhile."""

    load: Load
    replayed: Replayed
    foreign: float

    @property
    def tokens_per_second(self) -> float:
        """All tokens over the time from the first arrival to the last token."""
        return self.load.tokens / self.span_s

    @property
    def span_s(self) -> float:
        return float(self._last.max() - self._arrived.min())

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        """Arrival to last token of each request."""
        return (self._last - self._arrived) * 1e3

    @property
    def first_token_ms(self) -> NDArray[np.float64]:
        """Arrival to first token of each request."""
        return (np.array([stamps[0] for stamps in self.replayed.stamps]) - self._arrived) * 1e3

    @property
    def between_ms(self) -> NDArray[np.float64]:
        """From each token to the next of the same request."""
        gaps: NDArray[np.float64] = np.concatenate([np.diff(stamps) for stamps in self.replayed.stamps])
        return gaps * 1e3

    def progress(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Instants of all tokens in order, and how many there are by then (the paper's Fig. 7)."""
        instants = np.sort(np.concatenate([np.array(stamps) for stamps in self.replayed.stamps]))
        return instants, np.arange(1, len(instants) + 1)

    @property
    def _arrived(self) -> NDArray[np.float64]:
        return np.array([ask.at_s for ask in self.load.asks])

    @property
    def _last(self) -> NDArray[np.float64]:
        return np.array([stamps[-1] for stamps in self.replayed.stamps])


def check(load: Load, replayed: Replayed) -> None:
    """Raise ValueError unless every request got just the tokens it wanted, each with its instant."""
    for ask, stamps in zip(load.asks, replayed.stamps, strict=True):
        if len(stamps) != ask.new or np.any(np.diff(stamps) < 0):
            raise ValueError(f"{load.name}: {len(stamps)} tokens came of {ask.new}, or not in order")


def agreement(one: Replayed, other: Replayed, first: int) -> float:
    """The share of the first `first` tokens of each answer that are alike, up to the first that is not."""
    shares = []
    for left, right in zip(one.tokens, other.tokens, strict=True):
        pairs = list(zip(left[:first], right[:first], strict=True))
        shares.append(next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs))
    return float(np.mean(shares))


def median(values: Sequence[float]) -> float:
    return float(np.median(values))
