"""The beam searches among the running requests: a row of each iteration for each beam.

A beam that two new ones continue shares its full blocks with both, and one of them gets a copy of its last, partly
filled block. Nothing else is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from shapeshift.errors import EngineError
from shapeshift.fused_decode.engine.beam_search import BeamSearch, Candidates, Flags, Floats, Integers
from shapeshift.fused_decode.engine.sampling.logit_edits import NumpyLogits
from shapeshift.fused_decode.engine.sampling.logprobs import ranking
from shapeshift.fused_decode.engine.slots import DECODE, SlotTable
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, Runtime, blocks_of
from shapeshift.fused_decode.request import LENGTH, STOP, Reason, Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.settings import require


def require_room(table: SlotTable, request: Request) -> None:
    """Raise InvalidInputError where the beams of `request` have no room, even alone. Any thread may call this."""
    rows = request.rows
    if rows > 1:
        require(rows <= len(table), "num_beams", rows, f"at most max_concurrency ({len(table)})")
        require_memory(request, table.pool.count)


def require_memory(request: Request, blocks: int, held: int = 0) -> None:
    """Raise InvalidInputError where `blocks`, of which `held` hold something else, have no room for its beams."""
    rows, tokens = request.rows, request.longest
    if rows > 1:
        most = (blocks - held) // blocks_of(tokens)
        holds = f"the texts of {tokens} tokens that kv_cache_tokens ({blocks * BLOCK_TOKENS}) holds"
        beside = f" beside an adapter of {held * BLOCK_TOKENS}" if held else ""
        require(rows <= most, "num_beams", rows, f"at most {most}, {holds}{beside}")


@dataclass(frozen=True)
class _Choice:
    """What one request's search goes on with; None: the logits are not finite."""

    request: Request
    found: Candidates | None


class Beams:
    """Only the generating thread uses it."""

    def __init__(self, table: SlotTable, runtime: Runtime) -> None:
        self._table = table
        self._runtime = runtime
        self._eos_ids = sorted(runtime.eos_ids)
        self._rank = ranking()
        self._choices: list[_Choice] = []

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

    def choose(self, logits: torch.Tensor, wanted: Integers) -> Integers:
        """Find the candidates of the searches among the rows; returns the other rows, INT64 [n].

        logits  FLOAT32 [rows, vocab_size]
        wanted  INT64 [rows]  the rows' slots
        """
        table = self._table
        is_beam = table.is_beam[wanted]
        self._choices = []
        if not np.count_nonzero(is_beam):
            return np.arange(len(wanted))
        rows = np.flatnonzero(is_beam)
        slots = wanted[rows]
        requests = dict.fromkeys(request for slot in slots.tolist() if (request := table.owners[slot]) is not None)
        ends = {request: self._ends(request.sampling_params) for request in requests}
        most = max(_search(request).count(len(own)) for request, own in ends.items())
        searched = logits if len(rows) == len(wanted) else logits[torch.from_numpy(rows)]
        scores, tokens, finite = self._likeliest(searched.cpu().numpy(), slots, most)
        places = {slot: row for row, slot in enumerate(slots.tolist())}
        for request, own in ends.items():
            search = _search(request)
            # In the beginning all beams are the prompt, which is in the first slot.
            beams = [places.get(slot, places[search.slots[0]]) for slot in search.slots]
            width = search.count(len(own))
            found = search.rank(scores[beams, :width], tokens[beams, :width], own) if finite[beams].all() else None
            self._choices.append(_Choice(request, found))
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
        choices, self._choices = self._choices, []
        for request, found in ((one.request, one.found) for one in choices):
            if found is None:
                yield request, EngineError("the model's logits are not finite")
                continue
            search = _search(request)
            parents = search.advance(found)
            if search.is_done:
                yield request, LENGTH if search.is_full else STOP
                continue
            copies += self._continue(search, parents)
            request.slot = search.slots[0]
            yield request, None
        if copies:
            sources, targets = (list(column) for column in zip(*copies, strict=True))
            self._runtime.copy_blocks(sources, targets)

    def _continue(self, search: BeamSearch, parents: Integers) -> Iterable[tuple[int, int]]:
        """Let the slots follow the beams; the blocks to copy, and where to.

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
            copies += [] if copy is None else [copy]
        search.slots = continued
        own = np.array(continued)
        table.tokens[own, table.length[own]] = search.answers[:, -1]
        table.length[own] += 1
        table.phase[own] = DECODE
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
    own = table.blocks[target, left : table.held[target]].copy()
    shared = table.blocks[source, :full]
    table.pool.hold(shared)
    table.pool.release(table.blocks[target, :left])
    table.held[target] = full + len(own)
    table.blocks[target, : table.held[target]] = np.concatenate([shared, own])
    table.cached[target], table.length[target] = table.cached[source], length
    table.tokens[target, :length] = table.tokens[source, :length]
    table.chains.fork(source, target, full)
    return (int(table.blocks[source, full]), int(own[0])) if rest else None


def _search(request: Request) -> BeamSearch:
    assert request.beams is not None
    return request.beams
