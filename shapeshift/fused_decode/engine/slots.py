"""The slots: their owners, their tokens and blocks, and the sampling parameters of their requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.engine.blocks import BlockPool, block_hash, first_hash
from shapeshift.fused_decode.engine.sampling import SamplingTable
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, blocks_of
from shapeshift.fused_decode.request import NO_ADAPTER, Request

FREE, PREFILL, DECODE = 0, 1, 2
_WATERMARK = 100
"""One in so many blocks stays free for running requests when another one is admitted."""

Slots = npt.NDArray[np.int64]


class SlotTable:
    """The state of each slot, as arrays over the slots. Only the generating thread uses it.

    pool: the blocks that hold the texts; a text gets them as it grows, and shares those of texts that begin alike.

    phase    INT8 [slots]   FREE, PREFILL (its prompt is not complete in the cache) or DECODE
    cached   INT64 [slots]  tokens whose keys and values the model holds
    tokens   INT32 [slots, max_length + 1]  prompt and answer
    length   INT64 [slots]  number of these; a decoding slot has one more than is cached
    adapters INT32 [slots]  the request's adapter
    drafted  INT64 [slots]  proposed tokens behind these, for this iteration alone
    blocks   INT32 [slots, n]  blocks of the text, of which the first `held` INT64 [slots] count
    """

    def __init__(self, slots: int, max_length: int, pool: BlockPool) -> None:
        self.owners: list[Request | None] = [None] * slots
        self.phase = np.zeros(slots, np.int8)
        self.cached = np.zeros(slots, np.int64)
        self.length = np.zeros(slots, np.int64)
        self.drafted = np.zeros(slots, np.int64)
        self.end = np.zeros(slots, np.int64)
        self.ignore_eos = np.zeros(slots, bool)
        self.adapters = np.full(slots, NO_ADAPTER, np.int32)
        self.tokens = np.zeros((slots, max_length + 1), np.int32)
        self.sampling = SamplingTable(slots, self.tokens)
        self.used = 0
        self.pool = pool
        self.blocks = np.zeros((slots, blocks_of(max_length)), np.int32)
        self.held = np.zeros(slots, np.int64)
        assert pool.count >= self.blocks.shape[1], "the longest text does not fit the cache"
        self._hashes: list[list[bytes]] = [[] for _ in range(slots)]
        self._remembered = np.zeros(slots, np.int64)
        self._shared = 0
        self._watermark = max(1, pool.count // _WATERMARK)
        self._promised = 0
        self._admissions = 0
        self._age = np.zeros(slots, np.int64)

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        """Slots without a request."""
        return len(self.owners) - self.used

    def begin_iteration(self) -> None:
        """An iteration begins."""
        self._promised = 0
        if self.pool.borrower is not None:
            self.pool.borrower.begin_iteration()

    def grow(self) -> list[Request]:
        """Give each decoding slot the block of its next token, the oldest first.

        Where there is none, the youngest requests lose their slots: returns them, the youngest first.
        """
        preempted: list[Request] = []
        short = np.flatnonzero((self.phase == DECODE) & (self.cached == self.held * BLOCK_TOKENS))
        for slot in short[np.argsort(self._age[short])]:
            while self.phase[slot] and not self._extend(int(slot), 1):
                youngest = self.owners[int(np.where(self.phase, self._age, -1).argmax())]
                assert youngest is not None and self.used > 1, "the blocks do not hold one text"
                self.preempt(youngest)
                preempted.append(youngest)
        return preempted

    def fits(self, request: Request) -> bool:
        """Whether the tokens that `request` has fit beside those of the requests of which this was said already in this
        iteration; a few blocks are left for what runs."""
        wanted = blocks_of(len(request.prompt) + len(request.kept))
        spare = self.pool.available - self._promised
        if min(wanted + self._watermark, blocks_of(request.tokens)) > spare:
            return False
        self._promised += wanted
        return True

    def allocate(self, request: Request) -> int:
        """Give `request` the first free slot, and blocks for the tokens that it has: those that exist, and new ones.

        At least its last token is computed, since its logits are wanted.
        """
        slot = int((self.phase == FREE).argmax())
        params = request.sampling_params
        prompt = len(request.prompt)
        length = prompt + len(request.kept)
        self.owners[slot] = request
        self.used += 1
        self.phase[slot] = PREFILL
        self.length[slot] = length
        self.end[slot] = prompt + request.limit
        self.ignore_eos[slot] = params.ignore_eos
        self.adapters[slot] = request.adapter_id
        self.tokens[slot, :prompt] = request.prompt
        self.tokens[slot, prompt:length] = request.kept
        self.sampling.set(slot, params, prompt, request.rules, request.grammar)
        self._age[slot] = self._admissions = self._admissions + 1
        request.slot = slot
        self.share_prefix(slot)
        has_blocks = self._extend(slot, blocks_of(length) - int(self.held[slot]))
        assert has_blocks, "a request is admitted that does not fit"
        return slot

    def share_prefix(self, slot: int) -> None:
        """Let the prompt in `slot` go on with blocks that other texts have filled, in place of its own empty ones."""
        first, rest = divmod(int(self.cached[slot]), BLOCK_TOKENS)
        if rest:
            return
        found = self.pool.share(self._chain(slot, self._shareable(slot))[first:])
        end = first + len(found)
        self.pool.release(self.blocks[slot, first : min(end, self.held[slot])])
        self.blocks[slot, first:end] = found
        self.held[slot] = max(self.held[slot], end)
        self.cached[slot] = end * BLOCK_TOKENS
        self._remembered[slot] = end
        self._shared += len(found) * BLOCK_TOKENS

    def next_block(self, slot: int) -> bytes | None:
        """The hash of the block that the prompt in `slot` fills next; None where no other text would share it."""
        place = int(self.cached[slot]) // BLOCK_TOKENS
        return self._chain(slot, place + 1)[place] if place < self._shareable(slot) else None

    def pop_shared(self) -> int:
        """Tokens that were shared since this was last asked."""
        shared, self._shared = self._shared, 0
        return shared

    def release(self, request: Request) -> None:
        """Free the slot of `request`."""
        slot = request.slot
        assert slot is not None and self.owners[slot] is request, "the slot belongs to another request"
        self._vacate(slot)
        self.used -= 1
        request.slot = None

    def preempt(self, request: Request) -> None:
        """Free the slot of `request`, which keeps its tokens; with a slot again, it prefills all of them."""
        slot = request.slot
        assert slot is not None
        request.kept = self.tokens[slot, len(request.prompt) : self.length[slot]].copy()
        self.release(request)

    def clear(self) -> None:
        """Free every slot."""
        for slot, owner in enumerate(self.owners):
            if owner is not None:
                owner.slot = None
                self._vacate(slot)
        self.used = 0

    def draft(self, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        """Propose at most `BLOCK_TOKENS` - 1 tokens for the decoding `slot`: as many of them as free blocks hold.

        A block more than its text needs now stays with the slot: the text grows into it.
        """
        count, length = len(tokens), int(self.length[slot])
        more = blocks_of(length + count) - int(self.held[slot])
        if more > 0 and self.pool.free - more >= self._watermark:
            self._extend(slot, more)
        count = min(count, int(self.held[slot]) * BLOCK_TOKENS - length)
        self.tokens[slot, length : length + count] = tokens[:count]
        self.drafted[slot] = count

    def advance(self, slots: Slots, lengths: Slots, chosen: Slots, places: Slots, tokens: Slots) -> None:
        """Record an iteration: `lengths` more tokens of `slots` are cached, and these new tokens were chosen.

        chosen, places, tokens  INT64 [new tokens]  slot, place in its text, and token, in the order of the texts
        """
        self.drafted[slots] = 0
        self.tokens[chosen, places] = tokens
        self.cached[slots] += lengths
        if self.pool.caching:
            self._remember(slots)
        # Of the tokens of one slot the last one counts.
        self.length[chosen] = places + 1
        self.phase[chosen] = DECODE

    def check_integrity(self) -> None:
        """Raise AssertionError when the columns contradict one another."""
        self.pool.check_integrity([self.blocks[slot, :held] for slot, held in enumerate(self.held)])
        assert not self.drafted.any(), "a proposal outlives its iteration"
        held = [slot for slot, owner in enumerate(self.owners) if owner is not None]
        assert self.used == len(held), "the number of held slots is wrong"
        assert held == np.flatnonzero(self.phase).tolist(), "a slot is held without a phase, or the reverse"
        for slot, owner in enumerate(self.owners):
            if owner is None:
                assert self.cached[slot] == self.length[slot] == self.held[slot] == 0, f"free slot {slot} holds tokens"
                continue
            assert owner.slot == slot and not owner.is_finished, f"slot {slot} is held by a request that has left it"
            assert self.length[slot] == len(owner.prompt) + owner.generated, f"slot {slot} has lost tokens"
            needed = blocks_of(max(self.cached[slot], self.length[slot] - 1))
            assert needed <= self.held[slot] <= needed + 1, f"slot {slot} has {self.held[slot]} blocks for {needed}"
            behind = self.length[slot] - self.cached[slot]
            assert behind == 1 or (self.phase[slot] == PREFILL and behind > 1), f"slot {slot} is out of step"

    def _remember(self, slots: Slots) -> None:
        """Let other texts share the blocks that these slots have filled."""
        full = self.cached[slots] // BLOCK_TOKENS
        more = full > self._remembered[slots]
        for slot, count in zip(slots[more].tolist(), full[more].tolist(), strict=True):
            hashes = self._chain(slot, count)
            for place in range(int(self._remembered[slot]), count):
                self.pool.remember(int(self.blocks[slot, place]), hashes[place])
            self._remembered[slot] = count

    def _shareable(self, slot: int) -> int:
        """Blocks of the text in `slot` that another text may have filled: its last token is always computed."""
        request = self.owners[slot]
        assert request is not None
        if not self.pool.caching:
            return 0
        if request.sampling_params.prompt_logprobs is not None:
            # The logits after each token of the prompt are wanted; a preempted request has some of them.
            return len(request.prompt_logprobs) // BLOCK_TOKENS
        return int(self.length[slot] - 1) // BLOCK_TOKENS

    def _chain(self, slot: int, count: int) -> list[bytes]:
        """The hashes of the first `count` blocks of the text in `slot`."""
        found = self._hashes[slot]
        last = found[-1] if found else first_hash(int(self.adapters[slot]))
        for place in range(len(found), count):
            last = block_hash(last, self.tokens[slot, place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
            found.append(last)
        return found[:count]

    def _extend(self, slot: int, count: int) -> bool:
        """Give `slot` so many more blocks; False where there are not as many."""
        found = self.pool.take(count)
        if found is None:
            return False
        held = self.held[slot]
        self.blocks[slot, held : held + count] = found
        self.held[slot] += count
        return True

    def _vacate(self, slot: int) -> None:
        self.owners[slot] = None
        self.phase[slot] = FREE
        self.cached[slot] = self.length[slot] = self.drafted[slot] = 0
        self.adapters[slot] = NO_ADAPTER
        self.pool.release(self.blocks[slot, : self.held[slot]])
        self.blocks[slot] = self.held[slot] = 0
        self._hashes[slot] = []
        self._remembered[slot] = 0
