"""Loads of the decode benchmark, and a system's run under one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.peers.protocol import DecodeRequest, Replayed

PROMPT = 32
SLOTS = 32
"""Requests of an iteration of our decode loop."""
PAPER_REQUEST_S = 5.8
"""Seconds of a single request in the paper (Fig. 5). Its intervals are scaled by our time over this."""
LONGEST = 256
_SPARE = 32
"""Tokens that a request may have beyond the longest prompt and answer."""


@dataclass(frozen=True)
class Load:
    """Requests under one name. Systems that are compared get the same requests."""

    name: str
    requests: list[DecodeRequest]

    @property
    def tokens(self) -> int:
        return sum(request.new_tokens for request in self.requests)


class LoadGenerator:
    """Draws loads from a seed: prompts of tokens in `words`, answers of `new_tokens` tokens.

    request_s: seconds of one of our requests alone.
    """

    def __init__(self, seed: int, words: Sequence[int], new_tokens: int, prompt: int = PROMPT) -> None:
        self.prompt = prompt
        self._rng = np.random.default_rng(seed)
        self._words = np.array(words)
        self._new_tokens = new_tokens

    def at_once(self, count: int) -> Load:
        """`count` requests at the same instant."""
        return self._load(f"{count} at once", np.zeros(count))

    def poisson(self, count: int, request_s: float, paper_ms: int) -> Load:
        """Poisson arrivals with one of the paper's mean gaps, scaled."""
        gap_s = paper_ms / 1e3 * request_s / PAPER_REQUEST_S
        gaps = self._rng.exponential(gap_s, count)
        name = f"Poisson, mean gap {gap_s * 1e3:.0f} ms (paper: {paper_ms})"
        return self._load(name, np.cumsum(gaps) - gaps[0])

    def _load(self, name: str, instants: NDArray[np.float64]) -> Load:
        prompts = self._rng.choice(self._words, (len(instants), self.prompt)).tolist()
        pairs = zip(instants.tolist(), prompts, strict=True)
        return Load(name, [DecodeRequest(at_s, prompt, self._new_tokens) for at_s, prompt in pairs])


def max_length(prompt: int) -> int:
    """The tokens that a request with a prompt of `prompt` tokens may have."""
    return prompt + LONGEST + _SPARE


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

    @property
    def _arrived(self) -> NDArray[np.float64]:
        return np.array([request.at_s for request in self.load.requests])

    @property
    def _last(self) -> NDArray[np.float64]:
        return np.array([stamps[-1] for stamps in self.replayed.stamps])


def check(load: Load, replayed: Replayed) -> None:
    """Raise ValueError unless every request has as many tokens as it asked for, in order of time."""
    for request, stamps in zip(load.requests, replayed.stamps, strict=True):
        if len(stamps) != request.new_tokens or np.any(np.diff(stamps) < 0):
            raise ValueError(f"{load.name}: got {len(stamps)} tokens of {request.new_tokens}, or tokens out of order")


def agreement(one: Replayed, other: Replayed, first: int) -> float:
    """The share of the first `first` tokens of each answer that agree, up to the first difference."""
    shares = []
    for left, right in zip(one.tokens, other.tokens, strict=True):
        pairs = list(zip(left[:first], right[:first], strict=True))
        shares.append(next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs))
    return float(np.mean(shares))


def median(values: Sequence[float]) -> float:
    return float(np.median(values))
