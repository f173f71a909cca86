"""Beam search: which beams of a prompt go on, which texts are complete, and how the beams share blocks.

The rules are those of `generate(num_beams=...)` in transformers 5, in FLOAT32 as there. Each beam is a row of each
iteration. A beam that two new ones continue shares its full blocks with both, and one of them gets a copy of its last,
partly filled block. Nothing else is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.errors import EngineError
from shapeshift.fused_decode.engine.sampling.logit_edits import NumpyLogits
from shapeshift.fused_decode.engine.sampling.sampler import largest
from shapeshift.fused_decode.engine.slots import DECODE, SlotTable
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, Runtime
from shapeshift.fused_decode.request import LENGTH, STOP, Reason, Request
from shapeshift.fused_decode.sampling_params import NEVER, SamplingParams

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]

Ranking = Callable[[Floats, int], tuple[Floats, Integers]]
"""(logits [rows, vocab_size], count): the `log_norms` of the rows and the `largest` of each.

A row whose norm is NaN may have any places."""

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

    def advance(self, candidates: Candidates) -> Integers:
        """Give each beam its next token; the beams that the new ones continue, INT64 [num_beams]."""
        length = self.length + 1
        hits = candidates.is_end | (length >= self._limit)
        # Those behind the first num_beams are there so that enough beams go on.
        for place in np.flatnonzero(hits[: self._beams]).tolist():
            text = np.append(self.answers[candidates.parents[place]], candidates.tokens[place].astype(np.int32))
            score = self._penalised(candidates.scores[place], length)
            self.hypotheses.append(Hypothesis(text, score, bool(candidates.is_end[place])))
        self._keep_best()
        running = candidates.scores + np.where(hits, _WORST, np.float32(0))
        best = np.argsort(-running, kind="stable")[: self._beams]
        parents: Integers = candidates.parents[best]
        self.scores = running[best]
        self.answers = np.concatenate([self.answers[parents], candidates.tokens[best, None].astype(np.int32)], axis=1)
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


class Beams:
    """The beam searches among the running requests. Only the generating thread uses it."""

    def __init__(self, table: SlotTable, runtime: Runtime) -> None:
        self._table = table
        self._runtime = runtime
        self._eos_ids = sorted(runtime.eos_ids)
        self._rank = ranking()
        # What the searches go on with; None: the logits are not finite.
        self._choices: list[tuple[Request, Candidates | None]] = []

    def resume(self, prefilling: dict[Request, None]) -> None:
        """Let the requests decode whose beams have been preempted and are all in the cache again."""
        table = self._table
        for request in [one for one in prefilling if one.beams is not None and one.generated]:
            slots = request.slots
            for slot in slots:
                table.share_prefix(slot)
            if not any(map(table.uncomputed, slots)):
                table.phase[slots] = DECODE
                del prefilling[request]

    def choose(self, logits: torch.Tensor, chosen: Integers) -> Integers:
        """Find the candidates of the searches among the rows; returns the other rows, INT64 [n].

        logits  FLOAT32 [rows, vocab_size]
        wanted  INT64 [rows]  the rows' slots
        """
        table = self._table
        is_beam = table.is_beam[chosen]
        self._choices = []
        if not np.count_nonzero(is_beam):
            return np.arange(len(chosen))
        rows = np.flatnonzero(is_beam)
        slots = chosen[rows]
        requests = dict.fromkeys(request for slot in slots.tolist() if (request := table.owners[slot]) is not None)
        ends = {request: self._ends(request.sampling_params) for request in requests}
        most = max(_search(request).count(len(end_ids)) for request, end_ids in ends.items())
        searched = logits if len(rows) == len(chosen) else logits[torch.from_numpy(rows)]
        scores, tokens, finite = self._likeliest(searched.cpu().numpy(), slots, most)
        places = {slot: row for row, slot in enumerate(slots.tolist())}
        for request, end_ids in ends.items():
            search = _search(request)
            # In the beginning all beams are the prompt, which is in the first slot.
            beams = [places.get(slot, places[search.slots[0]]) for slot in search.slots]
            width = search.count(len(end_ids))
            candidates = (
                search.rank(scores[beams, :width], tokens[beams, :width], end_ids) if finite[beams].all() else None
            )
            self._choices.append((request, candidates))
        return np.flatnonzero(~is_beam)

    def _likeliest(self, logits: Floats, slots: Integers, most: int) -> tuple[Floats, Integers, Flags]:
        """The logprobs of the `most` likeliest tokens after each row, these tokens, and whether the row is finite."""
        edits, most = self._table.sampling.edits, min(most, logits.shape[1])
        norms, tokens = self._rank(logits, most)
        finite = np.isfinite(norms)
        edited = edits.rows(slots)
        if edited.size:
            # Edits act on logprobs, as in transformers.
            logits[edited] -= norms[edited, None]
            norms[edited] = 0
            edits.apply(NumpyLogits(logits), edited, slots, self._table.length[slots])
            tokens[edited] = self._rank(logits[edited], most)[1]
        return np.take_along_axis(logits, tokens, axis=1) - norms[:, None], tokens, finite

    def advance(self) -> Iterator[tuple[Request, Reason | None]]:
        """Give the beams the tokens of the last `choose`; yields each request, and why it ends now, if it does."""
        copies: list[tuple[int, int]] = []
        forks: list[tuple[int, int]] = []
        choices, self._choices = self._choices, []
        for request, candidates in choices:
            if candidates is None:
                yield request, EngineError("the model's logits are not finite")
                continue
            search = _search(request)
            parents = search.advance(candidates)
            if search.is_done:
                yield request, LENGTH if search.is_full else STOP
                continue
            copies += self._continue(search, parents, forks)
            request.slot = search.slots[0]
            yield request, None
        for copy, pairs in ((self._runtime.copy_blocks, copies), (self._runtime.copy_states, forks)):
            if copy is not None and pairs:
                copy(*(list(column) for column in zip(*pairs, strict=True)))

    def _continue(
        self, search: BeamSearch, parents: Integers, forks: list[tuple[int, int]]
    ) -> Iterable[tuple[int, int]]:
        """Let the slots follow the beams; the blocks to copy, and where to. `forks` grows by the slots.

        The first beam that continues a text keeps its slot. The others get the slots of texts that nobody continues.
        """
        table, slots = self._table, search.slots
        has_begun = search.length > 1
        sources = [slots[parent] if has_begun else slots[0] for parent in parents.tolist()]
        spare = [slot for slot in slots if slot not in sources]
        continued: list[int] = []
        copies = []
        for source in sources:
            if source not in continued:
                continued.append(source)
                continue
            continued.append(spare.pop())
            copy = _fork(table, source, continued[-1])
            forks.append((source, continued[-1]))
            copies += [] if copy is None else [copy]
        search.slots = continued
        targets = np.array(continued)
        table.tokens[targets, table.length[targets]] = search.answers[:, -1]
        table.length[targets] += 1
        table.phase[targets] = DECODE
        return copies

    def _ends(self, params: SamplingParams) -> Integers:
        """The tokens that end a text."""
        return np.array([*([] if params.ignore_eos else self._eos_ids), *params.stop_token_ids], np.int64)


def _fork(table: SlotTable, source: int, target: int) -> tuple[int, int] | None:
    """Let the text in `target` become that in `source`, a slot of the same request, and share its full blocks.

    Returns the last block of `source` and the one that is to become its copy before the next step; None where the last
    block is full.
    """
    full, rest = divmod(int(table.cached[source]), BLOCK_TOKENS)
    left, length = int(table.cached[target]) // BLOCK_TOKENS, table.length[source]
    spare = table.blocks[target, left : table.held[target]].copy()
    shared = table.blocks[source, :full]
    table.pool.hold(shared)
    table.pool.release(table.blocks[target, :left])
    table.held[target] = full + len(spare)
    table.blocks[target, : table.held[target]] = np.concatenate([shared, spare])
    table.cached[target], table.length[target] = table.cached[source], length
    table.tokens[target, :length] = table.tokens[source, :length]
    table.chains.fork(source, target, full)
    return (int(table.blocks[source, full]), int(spare[0])) if rest else None


def _search(request: Request) -> BeamSearch:
    search: BeamSearch = request.beams
    return search


def ranking(native: bool = True) -> Ranking:
    """By the compiled kernel, where the runtime has loaded the kernels; else, and with native=False, in numpy."""
    kernel: Any = getattr(torch.ops.shapeshift_decode, "likeliest", None) if native else None
    if kernel is None:
        return lambda logits, count: (log_norms(logits), largest(logits, count))

    def rank(logits: Floats, count: int) -> tuple[Floats, Integers]:
        norms, places = kernel(torch.from_numpy(logits), count)
        return norms.numpy(), places.numpy()

    return rank


def log_norms(logits: Floats) -> Floats:
    """What is subtracted from the logits of each row to make logprobs, FLOAT32 [rows]; NaN where one is not finite."""
    best = logits.max(axis=1)
    # Row by row: what fits a core's cache is several times as fast.
    work = np.empty(logits.shape[1], np.float32)
    sums = np.empty(len(logits), np.float32)
    with np.errstate(invalid="ignore"):
        for row, scores in enumerate(logits):
            np.exp(np.subtract(scores, best[row], out=work), out=work)
            sums[row] = work.sum()
        return np.asarray(best + np.log(sums), np.float32)
