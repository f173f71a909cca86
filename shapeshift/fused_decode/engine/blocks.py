"""The blocks of the cache: which are free, which texts share by their hashes, and which another user has borrowed."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, BlockBorrower

Blocks = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]
_FREE, _BORROWED, _KEPT = 0, -1, -2


class BlockPool:
    """Blocks 0 to `count` - 1 of a cache. Only the generating thread changes it.

    A full block whose text has ended is kept with the hash of the text up to its end, until its memory is needed: the
    least recently used leave first. A text that begins alike shares it.

    borrower: the other user of the blocks, which gives back what it can when texts need them; None: there is none.
    """

    def __init__(self, count: int, *, caching: bool = True) -> None:
        """caching: False keeps and shares nothing."""
        self.count = count
        self.caching = caching
        self.borrower: BlockBorrower | None = None
        # References from texts, or one of the states above.
        self._references = np.zeros(count, np.int32)
        self._empty = count
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()
        # The number of what each block holds, 0 where nobody can share it.
        self._contents = np.zeros(count, np.int64)
        self._numbers = itertools.count(1)

    @property
    def free(self) -> int:
        """Blocks that neither a text nor the borrower has."""
        return self._empty + len(self._unheld)

    @property
    def available(self) -> int:
        """Blocks that texts can get now."""
        return self.free + (0 if self.borrower is None else self.borrower.reclaimable)

    @property
    def held(self) -> int:
        """Blocks that texts hold. Any thread."""
        return int((self._references > 0).sum())

    @property
    def usage(self) -> float:
        """Share of the blocks that texts hold, 0 to 1. Any thread."""
        return self.held / self.count

    @property
    def borrowed(self) -> int:
        """Blocks that the borrower has."""
        return int((self._references == _BORROWED).sum())

    @property
    def counts(self) -> list[int]:
        """Blocks that are empty, kept for texts that begin alike, held by one text, shared by several, and borrowed."""
        # In the order of the states: `_KEPT`, `_BORROWED`, `_FREE`, one reference, more.
        unheld, borrowed, empty, alone, shared = np.bincount(np.minimum(self._references, 2) - _KEPT, minlength=5)
        return [int(empty), int(unheld), int(alone), int(shared), int(borrowed)]

    def take(self, count: int) -> Blocks | None:
        """The first `count` free blocks, for a text; None, and nothing changes, where so many are not available."""
        if count > self.available:
            return None
        if count > self.free:
            assert self.borrower is not None
            self.borrower.reclaim(count)
        while count > self._empty:
            self._forget(next(iter(self._unheld)))
        blocks = np.flatnonzero(self._references == _FREE)[:count].astype(np.int32)
        self._references[blocks] = 1
        self._contents[blocks] = 0
        self._empty -= count
        return blocks

    def hold(self, blocks: Blocks) -> None:
        """One more text holds these blocks, which another text holds."""
        assert (self._references[blocks] > 0).all(), "a block is shared that no text holds"
        self._references[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """A text no longer holds these blocks, which are in its order."""
        # Backwards: the end of a text is of less use than its beginning.
        for block in reversed(blocks.tolist()):
            assert self._references[block] > 0, "a block is released that no text holds"
            self._references[block] -= 1
            if self._references[block] == _FREE:
                if block in self._hashes:
                    self._references[block] = _KEPT
                    self._unheld[block] = None
                else:
                    self._empty += 1

    def contents(self, blocks: Blocks) -> list[int]:
        """What these blocks hold, as numbers that are never used again: other blocks with equal texts have others."""
        return list(self._contents[blocks].tolist())

    def share(self, hashes: Iterable[bytes], contents: Sequence[int] = ()) -> list[int]:
        """The blocks with these hashes, up to the first that there is none of; a text holds them from now on.

        contents: of the first of them; where a block holds another one, it is not shared.
        """
        blocks = []
        for one, content in itertools.zip_longest(hashes, contents):
            block = self._shared(one, content)
            if block is None:
                break
            if block in self._unheld:
                del self._unheld[block]
                self._references[block] = 0
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def count_held(self, hashes: Iterable[bytes], contents: Sequence[int] = ()) -> int:
        """How many of the blocks with these hashes and `contents` texts hold, up to the first that none holds."""
        blocks = (self._shared(*both) for both in itertools.zip_longest(hashes, contents))
        held = (block is not None and self._references[block] > 0 for block in blocks)
        return sum(1 for _ in itertools.takewhile(bool, held))

    def remember(self, block: int, name: bytes) -> None:
        """A text that holds `block` has filled it; own: its hash. Of two equal blocks the first is remembered."""
        if name not in self._by_hash:
            self._by_hash[name] = block
            self._hashes[block] = name
            self._contents[block] = next(self._numbers)

    def clear(self) -> None:
        """No text holds a block, whatever was counted, and none can be shared. What is borrowed stays so."""
        self._references[self._references != _BORROWED] = _FREE
        self._empty = int((self._references == _FREE).sum())
        self._by_hash.clear()
        self._hashes.clear()
        self._unheld.clear()

    def borrow(self, count: int) -> int | None:
        """The first of `count` blocks in a row, from the end of the pool, where texts come last; None without such."""
        start = _last_run(self._references == _FREE, count)
        if start is None:
            start = _last_run((self._references == _FREE) | (self._references == _KEPT), count)
        if start is not None:
            for block in range(start, start + count):
                if block in self._unheld:
                    self._forget(block)
            self._references[start : start + count] = _BORROWED
            self._empty -= count
        return start

    def give_back(self, start: int, count: int) -> None:
        """The borrower no longer has this run."""
        assert (self._references[start : start + count] == _BORROWED).all(), "a block is given back that is not lent"
        self._references[start : start + count] = _FREE
        self._empty += count

    def check_integrity(self, tables: list[Blocks]) -> None:
        """Raise AssertionError unless exactly the blocks of these texts are held, each as often as texts have it."""
        expected = np.zeros(self.count, np.int64)
        for table in tables:
            assert len(np.unique(table)) == len(table), "a text has a block twice"
            expected[table] += 1
        assert (np.maximum(self._references, 0) == expected).all(), "a block is lost, or held by a text that has ended"
        assert self._empty == int((self._references == _FREE).sum()), "the number of free blocks is wrong"
        assert self._unheld.keys() == set(np.flatnonzero(self._references == _KEPT).tolist()), "a kept block is lost"
        assert self._by_hash == {name: block for block, name in self._hashes.items()}, "a hash is of another block"
        assert all(self._references[block] not in (_FREE, _BORROWED) for block in self._hashes), "a hash is out of date"
        if self.borrower is not None:
            self.borrower.check_integrity()

    def _shared(self, name: bytes | None, content: int | None) -> int | None:
        block = None if name is None else self._by_hash.get(name)
        return block if block is None or content is None or self._contents[block] == content else None

    def _forget(self, block: int) -> None:
        """Nobody can share the kept `block` any longer."""
        del self._unheld[block], self._by_hash[self._hashes.pop(block)]
        self._references[block] = _FREE
        self._empty += 1


class PrefixChains:
    """The chain of hashes of each slot: a block's hash is of all tokens up to its end, and of the adapter.

    tokens  INT32 [slots, max_length + 1]  the texts, which the slots' owner changes
    """

    def __init__(self, slots: int, pool: BlockPool, tokens: Blocks) -> None:
        self._pool = pool
        self._tokens = tokens
        self._hashes: list[list[bytes]] = [[] for _ in range(slots)]
        # Blocks that the pool knows already: shared ones, and those that were remembered.
        self._remembered = np.zeros(slots, np.int64)

    def chain(self, slot: int, count: int, adapter: int) -> list[bytes]:
        """The hashes of the first `count` blocks of the text in `slot`, computed with `adapter`."""
        hashes = self._hashes[slot]
        add_hashes(hashes, self._tokens[slot], count, adapter)
        return hashes[:count]

    def shared(self, slot: int, count: int) -> None:
        """The first `count` blocks of `slot` are those of other texts."""
        self._remembered[slot] = count

    def remember(self, slots: Numbers, full: Numbers, blocks: Blocks, adapters: Blocks) -> None:
        """Let other texts share the first `full`, INT64 [n], blocks of these slots.

        blocks, adapters: of all slots, as in `SlotTable`.
        """
        more = full > self._remembered[slots]
        for slot, count in zip(slots[more].tolist(), full[more].tolist(), strict=True):
            hashes = self.chain(slot, count, int(adapters[slot]))
            for place in range(int(self._remembered[slot]), count):
                self._pool.remember(int(blocks[slot, place]), hashes[place])
            self._remembered[slot] = count

    def fork(self, source: int, target: int, full: int) -> None:
        """The text in `target` becomes that in `source`, of which `full` blocks are full."""
        self._hashes[target] = self._hashes[source][:full]
        self._remembered[target] = self._remembered[source]

    def clear(self, slot: int) -> None:
        """The text in `slot` is gone."""
        self._hashes[slot] = []
        self._remembered[slot] = 0


def add_hashes(hashes: list[bytes], text: Blocks, count: int, adapter: int) -> None:
    """Go on with the `hashes` of the first blocks of `text`, INT32 [tokens], until there are `count`.

    Each is of the text up to the block's end, and of the adapter: keys and values depend on it, and each version has
    its own number.
    """
    last = hashes[-1] if hashes else hashlib.sha256(f"{BLOCK_TOKENS} {adapter}".encode()).digest()
    for place in range(len(hashes), count):
        tokens = text[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
        last = hashlib.sha256(last + tokens.tobytes()).digest()
        hashes.append(last)


def _last_run(free: npt.NDArray[np.bool_], count: int) -> int | None:
    """The first block of the last `count` free ones in a row."""
    taken = np.flatnonzero(~free)
    ends = np.append(taken, len(free))
    starts = np.append(-1, taken) + 1
    fitting = np.flatnonzero(ends - starts >= count)
    return int(ends[fitting[-1]] - count) if fitting.size else None
