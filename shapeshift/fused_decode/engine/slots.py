"""The slots: their owners, their tokens and blocks, and the sampling parameters of their requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.engine.blocks import BlockPool, PrefixChains, add_hashes
from shapeshift.fused_decode.engine.sampling.sampler import SamplingTable
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, blocks_of
from shapeshift.fused_decode.request import NO_ADAPTER, Request
from shapeshift.serving import events
from shapeshift.settings import require

FREE, PREFILL, DECODE, RESERVED = range(4)
PREEMPTED, FAILED = "preempted", "failed"
_WATERMARK = 100
"""One in so many blocks stays free for running requests when another one is admitted."""

Slots = npt.NDArray[np.int64]


class SlotTable:
    """The state of each slot, as arrays over the slots. Only the generating thread uses it.

    pool: the blocks that hold the texts; a text gets them as it grows, and shares those of texts that begin alike.

    phase    INT8 [slots]   FREE, PREFILL (its text is not complete in the cache), DECODE or RESERVED (for a beam, which
                            begins when the prompt is complete; it has a block and no text)
    cached   INT64 [slots]  tokens whose keys and values the model holds
    tokens   INT32 [slots, max_length + 1]  prompt and answer
    length   INT64 [slots]  number of these; a decoding slot has one more than is cached
    is_beam  BOOL [slots]   whether it is one of the slots of a request with beam search
    adapters INT32 [slots]  the request's adapter
    unknown  INT64 [slots]  the last ones of these that `unsettled` steps choose
    drafted  INT64 [slots]  proposed tokens behind these, for this iteration alone
    blocks   INT32 [slots, n]  blocks of the text, of which the first `held` INT64 [slots] count
    beams    number of slots with `is_beam`
    alike    so many further iterations have the rows of the last one, a token each, within the same blocks; any change
             of the slots makes it 0
    chains   the hashes of these blocks
    shared_tokens  tokens so far that texts shared instead of computing them
    """

    def __init__(self, slots: int, max_length: int, pool: BlockPool) -> None:
        self.owners: list[Request | None] = [None] * slots
        self.phase = np.zeros(slots, np.int8)
        self.cached, self.length, self.unknown, self.drafted, self.end, self.held, self._age = (
            np.zeros(slots, np.int64) for _ in range(7)
        )
        self.is_beam = np.zeros(slots, bool)
        self.adapters = np.full(slots, NO_ADAPTER, np.int32)
        self.tokens = np.zeros((slots, max_length + 1), np.int32)
        self.sampling = SamplingTable(slots, self.tokens)
        self.used = self.shared_tokens = self.unsettled = self.beams = self.alike = 0
        self.pool = pool
        self.blocks = np.zeros((slots, blocks_of(max_length)), np.int32)
        assert pool.count >= self.blocks.shape[1], "the longest text does not fit the cache"
        self.chains = PrefixChains(slots, pool, self.tokens)
        self._watermark = max(1, pool.count // _WATERMARK)
        self._promised = self._promised_slots = self._admissions = 0

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        """Slots without a request."""
        return len(self.owners) - self.used

    @property
    def requests(self) -> int:
        """Requests that hold slots. Any thread."""
        return len({*self.owners} - {None})

    @property
    def decoding(self) -> Slots:
        """The slots whose texts go on with a token each, in order."""
        decodes = self.phase == DECODE
        # What is being chosen may be the last token of a text.
        return np.flatnonzero(decodes & (self.length < self.end) if self.unsettled else decodes)

    @property
    def can_grow(self) -> bool:
        """Whether `grow` would preempt nobody."""
        return len(self._short()) <= self.pool.available

    def require_room(self, request: Request) -> None:
        """Raise InvalidInputError where the beams of `request` have no room, even alone. Any thread may call this."""
        if request.rows > 1:
            require(request.rows <= len(self), "num_beams", request.rows, f"at most max_concurrency ({len(self)})")
            request.require_memory(self.pool.count)

    def begin_iteration(self) -> None:
        """An iteration begins."""
        self._promised = self._promised_slots = 0
        if self.pool.borrower is not None:
            self.pool.borrower.begin_iteration()

    def grow(self) -> list[Request]:
        """Give each decoding slot the block of its next token, the oldest first.

        Where there is none, the youngest requests lose their slots: returns them, the youngest first.
        """
        if self.alike:
            return []
        preempted: list[Request] = []
        short = self._short()
        for slot in short[np.argsort(self._age[short])]:
            while self.phase[slot] and not self._extend(int(slot), 1):
                youngest = self.owners[int(np.where(self.phase, self._age, -1).argmax())]
                assert youngest is not None and self.used > 1, "the blocks do not hold one text"
                self.preempt(youngest)
                preempted.append(youngest)
        return preempted

    def fits(self, request: Request) -> bool:
        """Whether the tokens that `request` has fit beside those of the requests of which this was said already in this
        iteration, and whether there are slots for its beams; a few blocks are left for what runs."""
        texts = request.texts
        shared = self.shared_with_others(request) // BLOCK_TOKENS
        needed = texts * blocks_of(len(request.prompt) + request.generated) + request.rows - texts - shared
        spare = self.pool.available - self._promised
        if min(needed + self._watermark, request.rows * blocks_of(request.longest) - shared) > spare:
            return False
        if request.rows > self.free - self._promised_slots:
            return False
        self._promised += needed
        self._promised_slots += request.rows
        return True

    def allocate(self, request: Request) -> int:
        """Give `request` the first free slots, and blocks for the tokens that it has: those that exist, and new ones.

        At least its last token is computed, since its logits are wanted. Returns the tokens.
        """
        slots = np.flatnonzero(self.phase == FREE)[: request.rows].tolist()
        assert len(slots) == request.rows, "a request is admitted without slots"
        request.slot = slots[0]
        self._admissions += 1
        if request.beams is not None:
            request.beams.slots = slots
        texts = request.texts
        for place, slot in enumerate(slots):
            self._take(slot, request)
            if place < texts:
                self._fill(slot, request, request.preempted if request.beams is None else request.beams.answers[place])
            else:
                self.phase[slot] = RESERVED
                self._extend_surely(slot, 1)
        request.joined_with = request.generated
        if events.is_recording():
            shared, prompt = int(self.cached[slots[0]]), len(request.prompt)
            texts_of = {"prompt": prompt, "shared": shared, "adapter": request.adapter_id}
            events.record("join", slot=slots[0], slots=slots, **texts_of, blocks=self.pool.counts)
        return int(self.length[slots].sum())

    def uncomputed(self, slot: int) -> int:
        """Tokens of the text in `slot` to be computed before it decodes.

        A beam that has been preempted lacks its last one, which it computes together with the other beams; a text whose
        next token's mask is not there lacks it too.
        """
        request = self.owners[slot]
        assert request is not None
        waits = request.generated > 0 if request.beams is not None else not self.sampling.edits.may_join([slot]).all()
        return int(self.length[slot] - self.cached[slot]) - waits

    def share_prefix(self, slot: int) -> None:
        """Let the prompt in `slot` go on with blocks that other texts have filled, in place of its own empty ones."""
        first, rest = divmod(int(self.cached[slot]), BLOCK_TOKENS)
        if rest:
            return
        request = self.owners[slot]
        assert request is not None
        hashes = self.chains.chain(slot, self._shareable(slot), int(self.adapters[slot]))
        blocks = self.pool.share(hashes[first:], request.contents[first:])
        count = max(request.whole_chunks(first + len(blocks)) - first, 0)
        self.pool.release(np.array(blocks[count:], np.int32))
        blocks, end = blocks[:count], first + count
        self.pool.release(self.blocks[slot, first : min(end, self.held[slot])])
        self.blocks[slot, first:end] = blocks
        self.held[slot] = max(self.held[slot], end)
        self.cached[slot] = end * BLOCK_TOKENS
        self.chains.shared(slot, end)
        self.shared_tokens += len(blocks) * BLOCK_TOKENS
        if not request.generated and slot == request.slots[0]:
            # What it computed before it was preempted counts as its own.
            begin = max(first * BLOCK_TOKENS, request.chunks[-1] if request.chunks else 0)
            request.shared += max(end * BLOCK_TOKENS - begin, 0)

    def next_block(self, slot: int) -> bytes | None:
        """The hash of the block that the prompt in `slot` fills next; None where no other text would share it."""
        place = int(self.cached[slot]) // BLOCK_TOKENS
        is_shareable = place < self._shareable(slot)
        return self.chains.chain(slot, place + 1, int(self.adapters[slot]))[place] if is_shareable else None

    def release(self, request: Request, why: str = PREEMPTED) -> None:
        """Free the slots of `request`."""
        slots = request.slots
        for slot in slots:
            assert self.owners[slot] is request, "the slot belongs to another request"
            self.pool.release(self.blocks[slot, : self.held[slot]])
            self._empty(slot)
            self.used -= 1
        request.slot = None
        if events.is_recording():
            events.record("leave", slot=slots[0], tokens=request.generated, why=why, blocks=self.pool.counts)

    def preempt(self, request: Request) -> None:
        """Free the slots of `request`, which keeps its tokens; with slots again, it prefills all of them."""
        slot = request.slot
        assert slot is not None
        if request.beams is None:
            request.preempted = self.tokens[slot, len(request.prompt) : self.length[slot]].copy()
            # Equal texts that others have computed in other pieces differ in their last bits.
            request.contents = self.pool.contents(self.blocks[slot, : self.cached[slot] // BLOCK_TOKENS])
        self.release(request)

    def clear(self) -> None:
        """Free every slot, whatever its state is. No text shares what the cache holds now."""
        for slot, owner in enumerate(self.owners):
            if owner is not None:
                owner.slot = None
                self._empty(slot)
        self.pool.clear()
        self.used = self.unsettled = 0
        if events.is_recording():
            events.record("clear", why=FAILED, blocks=self.pool.counts)

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
        self.drafted[slot], self.alike = count, 0

    def advance(self, slots: Slots, lengths: Slots, chosen: Slots, places: Slots, tokens: Slots | None) -> None:
        """Record an iteration: `lengths` more tokens of `slots` are cached, and these new tokens are chosen.

        chosen, places, tokens  INT64 [new tokens]  slot, place in its text, and token, in the order of the texts;
                                tokens: None: `settle` gives them, once for each such step
        """
        self.cached[slots] += lengths
        # Of the tokens of one slot the last one counts.
        self.length[chosen] = places + 1
        if self.alike:
            # Nothing was proposed, and no text has filled a block.
            self.tokens[chosen, places] = tokens
            return
        self.drafted[slots] = 0
        self.phase[chosen] = DECODE
        if tokens is None:
            self.unsettled += 1
            self.unknown[chosen] += 1
        else:
            self.tokens[chosen, places] = tokens
        self._remember(slots)

    def settle(self, chosen: Slots, places: Slots, tokens: Slots) -> None:
        """The tokens, INT64 [n], at these places, which `advance` did not know; the slots still have the same texts."""
        self.unsettled -= 1
        self.tokens[chosen, places] = tokens
        self.unknown[chosen] -= 1
        self._remember(chosen)

    def check_integrity(self, prefilling: Iterable[Request]) -> None:
        """Raise AssertionError when the columns contradict one another, or the requests that are said to prefill."""
        in_phase = {owner for owner, phase in zip(self.owners, self.phase, strict=True) if phase == PREFILL}
        assert {*prefilling} == in_phase, "a prompt is lost"
        self.pool.check_integrity([self.blocks[slot, :held] for slot, held in enumerate(self.held)])
        assert not self.drafted.any(), "a proposal outlives its iteration"
        assert self.beams == self.is_beam.sum(), "the number of beams' slots is wrong"
        held = [slot for slot, owner in enumerate(self.owners) if owner is not None]
        assert self.used == len(held), "the number of held slots is wrong"
        assert held == np.flatnonzero(self.phase).tolist(), "a slot is held without a phase, or the reverse"
        further = self.sampling.listing | self.sampling.edits.edited | self.sampling.edits.guided
        assert further <= {*held}, "a free slot asks for something"
        requests = {owner: owner.slots for owner in self.owners if owner is not None}
        assert sorted(slot for slots in requests.values() for slot in slots) == held, "a request has lost a slot"
        assert all(len(slots) == request.rows for request, slots in requests.items()), "a request has lost a beam"
        for slot in range(len(self)):
            self._check_slot(slot)

    def _short(self) -> Slots:
        """The slots that decode and have no place for their next token."""
        return np.flatnonzero((self.phase == DECODE) & (self.cached == self.held * BLOCK_TOKENS))

    def _remember(self, slots: Slots) -> None:
        """Let other texts share the blocks that these slots have filled with known tokens."""
        if self.pool.caching:
            settled = self.cached[slots]
            if self.unsettled:
                settled = np.minimum(settled, self.length[slots] - self.unknown[slots])
            self.chains.remember(slots, settled // BLOCK_TOKENS, self.blocks, self.adapters)

    def _shareable(self, slot: int) -> int:
        """Blocks of the text in `slot` that another text may have filled: its last token is always computed."""
        request = self.owners[slot]
        assert request is not None
        return self._shareable_of(request, int(self.length[slot]))

    def _shareable_of(self, request: Request, length: int) -> int:
        if not self.pool.caching:
            return 0
        if request.sampling_params.prompt_logprobs is not None:
            # The logits after each token of the prompt are wanted; a preempted request has some of them.
            return len(request.prompt_logprobs) // BLOCK_TOKENS
        return (length - 1) // BLOCK_TOKENS

    def shared_with_others(self, request: Request) -> int:
        """Tokens of `request`, which has no slot, that running texts hold too: they take no further memory."""
        text = request.prompt if request.beams is not None else np.concatenate([request.prompt, request.preempted])
        count = self._shareable_of(request, len(text))
        add_hashes(request.hashes, text.astype(np.int32), count, request.adapter_id)
        blocks = request.whole_chunks(self.pool.count_held(request.hashes[:count], request.contents))
        return request.texts * blocks * BLOCK_TOKENS

    def _take(self, slot: int, request: Request) -> None:
        """Give the free `slot` to `request`, without text or blocks."""
        params = request.sampling_params
        self.owners[slot], self.alike = request, 0
        self.used += 1
        self.beams += request.beams is not None
        self.end[slot] = request.longest
        self.is_beam[slot] = request.beams is not None
        self.adapters[slot] = request.adapter_id
        self.sampling.set(slot, params, len(request.prompt), request.rules, request.grammar)
        self._age[slot] = self._admissions

    def _fill(self, slot: int, request: Request, answer: npt.NDArray[np.int32]) -> None:
        """Write the prompt of `request` and what it has of its `answer` to `slot`, with blocks for them."""
        text = np.concatenate([request.prompt, answer])
        self.phase[slot] = PREFILL
        self.length[slot] = len(text)
        self.tokens[slot, : len(text)] = text
        self.share_prefix(slot)
        self._extend_surely(slot, blocks_of(len(text)) - int(self.held[slot]))

    def _extend_surely(self, slot: int, count: int) -> None:
        has_blocks = self._extend(slot, count)
        assert has_blocks, "a request is admitted that does not fit"

    def _extend(self, slot: int, count: int) -> bool:
        """Give `slot` so many more blocks; False where there are not as many."""
        blocks = self.pool.take(count)
        if blocks is None:
            return False
        held = self.held[slot]
        self.blocks[slot, held : held + count] = blocks
        self.held[slot] += count
        self.alike = 0
        return True

    def _empty(self, slot: int) -> None:
        self.owners[slot], self.alike = None, 0
        self.phase[slot] = FREE
        self.beams -= int(self.is_beam[slot])
        self.sampling.clear(slot)
        self.cached[slot] = self.length[slot] = self.unknown[slot] = self.drafted[slot] = 0
        self.adapters[slot] = NO_ADAPTER
        self.is_beam[slot] = False
        self.blocks[slot] = self.held[slot] = 0
        self.chains.clear(slot)

    def _check_slot(self, slot: int) -> None:
        owner, length, blocks = self.owners[slot], self.length[slot], self.held[slot]
        if owner is None:
            assert self.cached[slot] == length == blocks == 0, f"free slot {slot} holds tokens"
            return
        assert slot in owner.slots and owner.slot is not None, f"slot {slot} is held by a request that left it"
        assert not owner.is_finished, f"slot {slot} is held by a finished request"
        assert self.is_beam[slot] == (owner.beams is not None), f"slot {slot} is taken for a beam, or the reverse"
        if self.phase[slot] == RESERVED:
            assert self.cached[slot] == length == 0 and blocks == 1, f"the reserved slot {slot} holds tokens"
            return
        assert length == len(owner.prompt) + owner.generated + self.unknown[slot], f"slot {slot} has lost tokens"
        needed = blocks_of(max(self.cached[slot], length - 1))
        assert needed <= blocks <= needed + 1, f"slot {slot} has {blocks} blocks for {needed}"
        behind = length - self.cached[slot]
        assert behind == 1 or (self.phase[slot] == PREFILL and behind > 1), f"slot {slot} is out of step"
        if owner.beams is not None:
            answer = owner.beams.answers[owner.slots.index(slot)]
            assert np.array_equal(self.tokens[slot, len(owner.prompt) : length], answer), f"beam {slot} is out of step"
