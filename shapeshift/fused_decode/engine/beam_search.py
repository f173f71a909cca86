"""The beam search of one prompt: which beams go on, and which texts are complete.

The rules are those of `generate(num_beams=...)` in transformers 5, in FLOAT32 as there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.sampling_params import NEVER, SamplingParams

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

_WORST = np.float32(-1e9)
"""Added to the score of what may not be chosen."""


class Hypothesis(NamedTuple):
    """A text that the search has found.

    tokens       INT32 [n]
    score        the sum of its tokens' logprobs over n ** length_penalty
    is_complete  whether its last token ends it
    """

    tokens: Tokens
    score: float
    is_complete: bool


class Candidates(NamedTuple):
    """The likeliest continuations of all beams together, the likeliest first.

    scores   FLOAT32 [n]  sum of the logprobs of all tokens
    parents  INT64 [n]    the beams that they continue
    tokens   INT64 [n]    their last tokens
    is_end   BOOL [n]     whether these end a text
    """

    scores: Floats
    parents: Integers
    tokens: Integers
    is_end: Flags


class BeamSearch:
    """The search for the answers to one prompt. Only the generating thread changes it.

    slots       the slots of the beams, in the order of `answers`, while the request has slots
    answers     INT32 [num_beams, n]   tokens of the beams so far
    scores      FLOAT32 [num_beams]    sums of their logprobs, the largest first
    hypotheses  complete texts, at most num_beams, the best one first
    is_done     whether no beam goes on
    """

    def __init__(self, params: SamplingParams, limit: int) -> None:
        """limit: most tokens of an answer."""
        self._beams = params.num_beams
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._returned = params.num_return_sequences
        self._limit = limit
        self.slots: list[int] = []
        self.answers: Tokens = np.zeros((self._beams, 0), np.int32)
        # In the beginning all beams are one text, of which one counts.
        self.scores: Floats = np.full(self._beams, _WORST)
        self.scores[0] = 0
        self.hypotheses: list[Hypothesis] = []
        self.is_done = False

    @property
    def length(self) -> int:
        """Tokens of each beam's answer."""
        return int(self.answers.shape[1])

    @property
    def is_full(self) -> bool:
        """Whether the answers have as many tokens as they may have."""
        return self.length >= self._limit

    @property
    def best(self) -> list[Hypothesis]:
        """The `num_return_sequences` best hypotheses."""
        return self.hypotheses[: self._returned]

    def count(self, ends: int) -> int:
        """The candidates that `advance` takes where so many tokens end a text: enough of them go on, whatever ends."""
        return self._beams * max(2, 1 + ends)

    def rank(self, logprobs: Floats, tokens: Integers, ends: Integers) -> Candidates:
        """The candidates among these continuations.

        logprobs, tokens  FLOAT32 and INT64 [num_beams, n], n the smaller of `count` and the vocabulary: the likeliest
                          tokens after each beam, the likeliest first
        ends              INT64 [n]: tokens that end a text
        """
        scores = logprobs + self.scores[:, None]
        order = np.argsort(-scores, axis=None, kind="stable")[: self.count(len(ends))]
        chosen = tokens.ravel()[order]
        return Candidates(scores.ravel()[order], order // scores.shape[1], chosen, np.isin(chosen, ends))

    def advance(self, found: Candidates) -> Integers:
        """Give each beam its next token; the beams that the new ones continue, INT64 [num_beams]."""
        length = self.length + 1
        hits = found.is_end | (length >= self._limit)
        # Those behind the first num_beams are there so that enough beams go on.
        for place in np.flatnonzero(hits[: self._beams]).tolist():
            text = np.append(self.answers[found.parents[place]], found.tokens[place].astype(np.int32))
            score = self._penalised(found.scores[place], length)
            self.hypotheses.append(Hypothesis(text, score, bool(found.is_end[place])))
        self._keep_best()
        running = found.scores + np.where(hits, _WORST, np.float32(0))
        kept = np.argsort(-running, kind="stable")[: self._beams]
        parents: Integers = found.parents[kept]
        self.scores = running[kept]
        self.answers = np.concatenate([self.answers[parents], found.tokens[kept, None].astype(np.int32)], axis=1)
        self.is_done = bool(hits.all()) or not self._can_improve()
        return parents

    def end(self) -> None:
        """No beam goes on. Where the search is not done, the beams are hypotheses as they are."""
        if not self.is_done:
            scores = self.scores if self.length else np.zeros(self._beams, np.float32)
            self.hypotheses += [
                Hypothesis(answer, self._penalised(score, max(self.length, 1)), False)
                for answer, score in zip(self.answers, scores, strict=True)
            ]
            self._keep_best()
        self.is_done = True

    def _can_improve(self) -> bool:
        """Whether a beam could become better than the worst hypothesis that is kept; a guess, as in transformers."""
        is_full = len(self.hypotheses) == self._beams
        if is_full and self._early_stopping is True:
            return False
        longest = self._early_stopping == NEVER and self._length_penalty > 0
        possible = self._penalised(self.scores[0], self._limit if longest else self.length)
        return possible > (self.hypotheses[-1].score if is_full else float(_WORST))

    def _penalised(self, score: np.float32, length: int) -> float:
        return float(score / np.float32(length**self._length_penalty))

    def _keep_best(self) -> None:
        self.hypotheses.sort(key=lambda one: one.score, reverse=True)
        del self.hypotheses[self._beams :]
