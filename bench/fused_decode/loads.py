"""Loads of the decode benchmark, and a system's answers to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.common.cells import Run
from bench.peers.protocol import DecodeRequest, Replayed

PROMPT = 32
SLOTS = 32
"""Requests of an iteration of our decode loop."""
PAPER_REQUEST_S = 5.8
"""Seconds of a single request in the paper (Fig. 5). Its intervals are scaled by our time over this."""
MAX_LENGTH = 320
"""The tokens that a request may have."""
PROMPTS = (512, 4096)
"""Tokens of long prompts, of whose requests an answer is `LONG_ANSWER` tokens."""
LONG_ANSWER = 4
NEW = 32
"""Tokens of a long prompt that no other request has, where the rest is shared."""


@dataclass(frozen=True)
class Load:
    """Requests under one name. Systems that are compared get the same requests."""

    name: str
    requests: list[DecodeRequest]

    @property
    def tokens(self) -> int:
        return sum(request.new_tokens for request in self.requests)


class LoadGenerator:
    """Draws loads from a seed: prompts of tokens in `words`, answers of `new_tokens` tokens."""

    def __init__(self, seed: int, words: Sequence[int], new_tokens: int) -> None:
        self.new_tokens = new_tokens
        self._rng = np.random.default_rng(seed)
        self._words = np.array(words)

    def at_once(self, count: int) -> Load:
        """`count` requests at the same instant."""
        return self._load(f"{count} at once", np.zeros(count))

    def poisson(self, count: int, request_s: float, paper_ms: int) -> Load:
        """Poisson arrivals with one of the paper's mean gaps, scaled. request_s: seconds of one of our requests."""
        gap_s = paper_ms / 1e3 * request_s / PAPER_REQUEST_S
        gaps = self._rng.exponential(gap_s, count)
        name = f"Poisson, mean gap {gap_s * 1e3:.0f} ms (paper: {paper_ms})"
        return self._load(name, np.cumsum(gaps) - gaps[0])

    def long_prompt(self, tokens: int, shared: Sequence[int] = ()) -> Load:
        """One request with a prompt of so many tokens, which begins with those that are `shared`."""
        prompt = [*shared, *self._rng.choice(self._words, tokens - len(shared)).tolist()]
        name = f"prompt of {tokens} tokens" + (f", all but {NEW} shared" if shared else "")
        return Load(name, [DecodeRequest(0.0, prompt, LONG_ANSWER)])

    def _load(self, name: str, instants: NDArray[np.float64]) -> Load:
        prompts = self._rng.choice(self._words, (len(instants), PROMPT)).tolist()
        pairs = zip(instants.tolist(), prompts, strict=True)
        return Load(name, [DecodeRequest(at_s, prompt, self.new_tokens) for at_s, prompt in pairs])


@dataclass(frozen=True)
class Answers:
    """What a system gave under a load. Raises ValueError unless every request has as many tokens as it asked for, in
    order of time."""

    load: Load
    replayed: Replayed

    def __post_init__(self) -> None:
        for request, stamps in zip(self.load.requests, self.replayed.stamps, strict=True):
            if len(stamps) != request.new_tokens or np.any(np.diff(stamps) < 0):
                got = f"got {len(stamps)} tokens of {request.new_tokens}, or tokens out of order"
                raise ValueError(f"{self.load.name}: {got}")

    @property
    def arrived_s(self) -> NDArray[np.float64]:
        return np.array([request.at_s for request in self.load.requests])

    @property
    def first_s(self) -> NDArray[np.float64]:
        """When each request got its first token."""
        return np.array([stamps[0] for stamps in self.replayed.stamps])

    @property
    def last_s(self) -> NDArray[np.float64]:
        """When each request got its last token."""
        return np.array([stamps[-1] for stamps in self.replayed.stamps])

    @property
    def between_s(self) -> NDArray[np.float64]:
        """From each token to the next of the same request."""
        gaps: NDArray[np.float64] = np.concatenate([np.diff(stamps) for stamps in self.replayed.stamps])
        return gaps

    @property
    def span_s(self) -> float:
        """From the first arrival to the last token."""
        return float(self.last_s.max() - self.arrived_s.min())


def figures(run: Run[Answers]) -> dict[str, float]:
    """Of a run; times count from a request's arrival."""
    answers = run.result
    first_ms, between_ms = 1e3 * (answers.first_s - answers.arrived_s), 1e3 * answers.between_s
    return {
        "tokens_per_second": answers.load.tokens / answers.span_s,
        "first_token_ms": float(first_ms.mean()),
        "first_token_p98_ms": float(np.percentile(first_ms, 98)),
        "between_ms": float(between_ms.mean()),
        "between_p98_ms": float(np.percentile(between_ms, 98)),
        "latency_ms": 1e3 * float((answers.last_s - answers.arrived_s).mean()),
        **answers.replayed.extra,
    }


def agreement(one: Replayed, other: Replayed, first: int) -> float:
    """The share of the first `first` tokens of each answer that agree, up to the first difference."""
    shares = []
    for left, right in zip(one.tokens, other.tokens, strict=True):
        pairs = list(zip(left[:first], right[:first], strict=True))
        shares.append(next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs))
    return float(np.mean(shares))
