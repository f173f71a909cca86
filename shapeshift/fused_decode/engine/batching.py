"""The batch of one iteration: a token of each decoding request, proposed ones behind it, and chunks of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.fused_decode.engine.sampling.sampler import logprobs_of
from shapeshift.fused_decode.engine.slots import PREFILL, Slots, SlotTable
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, StepBatch
from shapeshift.fused_decode.request import NO_ADAPTER, Request
from shapeshift.fused_decode.settings import MOST_DRAFTED

# Tokens of a prompt in one iteration where each one's logits are wanted: these take a vocabulary each.
_MOST_SCORED = 64
# So many tokens of a row the kernels compute as one after another, see `MOST_DRAFTED`.
_MOST_GENERATED = MOST_DRAFTED + 1
_NO_PLACES: Slots = np.empty(0, np.int64)


@dataclass(frozen=True)
class ScoredChunk:
    """The logits after `count` tokens of a prompt: of the tokens from `target` on, at `place` in the batch's tokens."""

    request: Request
    place: int
    target: int
    count: int


@dataclass(frozen=True)
class Step:
    """One iteration's batch, and the slots of its rows.

    slots, lengths  INT64 [rows]         slot and tokens of each row
    decoding        number of rows that decode; they come first
    chosen, places  INT64 [tokens to choose]  the slot of each token to choose, and its place there if all that is
                    proposed before it is chosen: first the last one of each row that gets a token, then those for
                    which tokens are proposed, row by row
    rows            number of rows that get a token
    scored          chunks of prompts whose tokens' logprobs are asked for
    late            places in `chosen` whose tokens cannot be chosen yet

    The logits of a step are those of the tokens to choose, in this order, then those of the scored chunks.
    """

    batch: StepBatch
    slots: Slots
    lengths: Slots
    decoding: int
    chosen: Slots
    places: Slots
    rows: int
    scored: tuple[ScoredChunk, ...] = ()
    late: Slots = field(default_factory=_NO_PLACES.copy)

    def without(self, late: Slots) -> Step:
        """The same step where no token comes at these places of `chosen`: the last one before is computed again."""
        if not late.size:
            return self
        lengths = self.lengths.copy()
        lengths[self.batch.logit_rows.numpy()[late]] -= 1
        return replace(self, lengths=lengths, late=late)


def compose(table: SlotTable, prefilling: Iterable[Request], prefill_tokens: int) -> Step | None:
    """The next iteration: all decoding slots in order, then chunks of prompts, at most `prefill_tokens` together.

    None where there is no row: the last tokens of all texts are being chosen, or masks of their next ones computed. The
    rows are numbered anew each time, so that there are no gaps where requests have ended.

    prefilling: requests whose prompts are not complete in the cache, in order of admission. The first ones get the
    budget first: one request that gets its first token soon is better than several that all get it late.
    """
    decoding = table.decoding[table.sampling.edits.may_join(table.decoding)]
    chunks = _chunks(table, prefilling, prefill_tokens)
    if not chunks and not decoding.size:
        return None
    slots, lengths = decoding, 1 + table.drafted[decoding]
    # The first token of each row, and how far each token is behind it.
    owners = np.repeat(decoding, lengths)
    behind = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = table.tokens[owners, table.cached[owners] + behind]
    rows = np.arange(len(slots))
    if chunks:
        slots = np.concatenate([slots, [slot for slot, _ in chunks]])
        lengths = np.concatenate([lengths, [count for _, count in chunks]])
        pieces = [table.tokens[slot, (start := table.cached[slot]) : start + count] for slot, count in chunks]
        tokens = np.concatenate([tokens, *pieces])
        rows = np.flatnonzero(table.cached[slots] + lengths >= table.length[slots])
    scored = _scored(table, chunks, len(owners))
    followed = np.flatnonzero(behind < table.drafted[owners])
    further = [torch.from_numpy(followed)] if followed.size else []
    further += [torch.arange(one.place, one.place + one.count) for one in scored]
    chosen, drafting = slots[rows], owners[followed]
    places = [table.length[chosen] + table.drafted[chosen], table.length[drafting] + behind[followed]]
    batch = StepBatch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        slots=torch.from_numpy(slots.astype(np.int32)),
        starts=torch.from_numpy(table.cached[slots].astype(np.int32)),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        logit_rows=torch.from_numpy(rows),
        adapters=_adapters(table, slots),
        spans=torch.from_numpy(table.end[slots].astype(np.int32)),
        blocks=torch.from_numpy(table.blocks[slots, : table.held[slots].max()]),
        further=torch.cat(further) if further else None,
        fed=_fed(table, decoding, len(tokens)),
        draws=table.sampling.draws,
    )
    choosing = np.concatenate([chosen, drafting]), np.concatenate(places), len(rows)
    return Step(batch, slots, lengths, len(decoding), *choosing, scored)


def alike(step: Step, table: SlotTable) -> int:
    """How many iterations with the rows of `step` can follow it, a token each, before a text begins a block."""
    if not step.decoding == step.rows == len(step.chosen) == len(step.slots) or table.sampling.edits.guided:
        return 0
    return BLOCK_TOKENS - 1 - int((table.cached[step.slots] % BLOCK_TOKENS).max())


def follow(step: Step, table: SlotTable) -> None:
    """Let `step`, which has been recorded, be the next iteration, one of those that are alike."""
    places = table.cached[step.slots]
    step.batch.tokens.numpy()[:] = table.tokens[step.slots, places]
    step.batch.starts.numpy()[:] = places
    step.places[:] += 1


def note_chunks(step: Step, table: SlotTable) -> None:
    """Remember the chunks of prompts in `step`, which the model has computed, and `table` does not have yet."""
    for row in range(step.decoding, len(step.slots)):
        slot = int(step.slots[row])
        request = table.owners[slot]
        assert request is not None
        start = int(table.cached[slot])
        for place in (start, start + int(step.lengths[row])):
            if (request.chunks[-1] if request.chunks else 0) < place <= len(request.prompt):
                request.chunks.append(place)


def score(scored: Sequence[ScoredChunk], logits: torch.Tensor) -> None:
    """Give the requests the logprobs of their prompts' tokens; `logits` are those of the chunks."""
    first = 0
    for chunk in scored:
        request, end = chunk.request, chunk.target + chunk.count
        listed = np.full(chunk.count, request.sampling_params.prompt_logprobs, np.int64)
        rows = logits[first : first + chunk.count].cpu().numpy()
        request.prompt_logprobs += logprobs_of(rows, request.prompt[chunk.target : end], listed)
        first += chunk.count


def _scored(table: SlotTable, chunks: Sequence[tuple[int, int]], place: int) -> tuple[ScoredChunk, ...]:
    """The chunks whose prompts' logprobs are asked for and not known yet; the first chunk is at `place`."""
    scored = []
    for slot, count in chunks:
        request = table.owners[slot]
        assert request is not None
        if request.sampling_params.prompt_logprobs is not None:
            start = int(table.cached[slot])
            # A preempted request prefills its prompt again.
            first = max(start, len(request.prompt_logprobs))
            end = min(start + count, len(request.prompt) - 1)
            if first < end:
                scored.append(ScoredChunk(request, place + first - start, first + 1, end - first))
        place += count
    return tuple(scored)


def _fed(table: SlotTable, decoding: Slots, tokens: int) -> torch.Tensor | None:
    """`StepBatch.fed`: the last tokens of decoding slots that a step in flight chooses; nothing is proposed then."""
    if not table.unsettled:
        return None
    fed = torch.zeros(tokens, dtype=torch.bool)
    fed[: len(decoding)] = torch.from_numpy(table.unknown[decoding] > 0)
    return fed


def _adapters(table: SlotTable, slots: Slots) -> torch.Tensor | None:
    """The adapter of each row; None where no row has one."""
    adapters = table.adapters[slots]
    return torch.from_numpy(adapters) if (adapters != NO_ADAPTER).any() else None


def _chunks(table: SlotTable, prefilling: Iterable[Request], budget: int) -> list[tuple[int, int]]:
    """(slot, tokens of its prompt) of each chunk.

    Of prompts that begin alike one is computed; the others wait and share its blocks in the next iteration. What a
    preempted request computes again is computed as before, so that its answer does not change by a bit: its prompt in
    the same chunks, its answer as if token after token.
    """
    chunks, most = [], budget
    filled: set[bytes] = set()
    for request, slot in ((one, slot) for one in prefilling for slot in one.slots):
        if not budget:
            break
        if table.phase[slot] != PREFILL:
            continue
        table.share_prefix(slot)
        next_block = table.next_block(slot)
        if next_block is not None:
            if next_block in filled:
                continue
            filled.add(next_block)
        count = min(budget, table.uncomputed(slot))
        if request.sampling_params.prompt_logprobs is not None:
            count = min(count, _MOST_SCORED)
        again = _again(request, int(table.cached[slot]))
        if again is not None:
            if budget < again <= most:
                continue
            count = min(count, again)
        if count:
            chunks.append((slot, count))
        budget -= count
    return chunks


def _again(request: Request, start: int) -> int | None:
    """The most tokens from `start` on that are computed together since they were before; None: they were not before."""
    if start >= len(request.prompt):
        return _MOST_GENERATED
    return next((end - start for end in request.chunks if end > start), None)


@dataclass(frozen=True)
class Verified:
    """What an iteration gives: of each row the proposed tokens that the model chose too, and the token after them.

    taken     INT64 [new tokens]  their places among the step's tokens to choose, in the order of each text
    lengths   INT64 [rows]        tokens of each row whose keys and values stay
    accepted  number of proposed tokens among them
    """

    taken: Slots
    lengths: Slots
    accepted: int


def verify(step: Step, table: SlotTable, tokens: Slots) -> Verified:
    """Compare `tokens`, which were chosen for `step`, with the proposals in `table`."""
    rows = step.rows
    if len(tokens) == rows:
        return Verified(np.arange(rows), step.lengths, 0)
    agrees = table.tokens[step.chosen, step.places] == tokens
    taken: list[int] = []
    lengths, first = step.lengths.copy(), rows
    for row, count in enumerate(table.drafted[step.chosen[:rows]].tolist()):
        chosen = leading(agrees[first : first + count])
        taken += range(first, first + min(chosen + 1, count))
        if chosen == count:
            taken.append(row)
        else:
            # Rows that decode come first, here and there.
            lengths[row] -= count - chosen
        first += count
    return Verified(np.array(taken), lengths, len(taken) - rows)


def leading(agrees: npt.NDArray[np.bool_]) -> int:
    """How many of BOOL [n] are true before the first that is not."""
    return len(agrees) if agrees.all() else int(agrees.argmin())
