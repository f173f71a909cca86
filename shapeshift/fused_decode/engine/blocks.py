"""The blocks of the cache: which are free, which texts hold, and which another user has borrowed as runs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.interfaces import BlockBorrower

Blocks = npt.NDArray[np.int32]
_FREE, _BORROWED = 0, -1


class BlockPool:
    """Blocks 0 to `count` - 1 of a cache. Only the generating thread changes it.

    borrower: the other user of the blocks, which gives back what it can when texts need them; None: there is none.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.borrower: BlockBorrower | None = None
        # References from texts; -1 of a block that is borrowed.
        self._references = np.zeros(count, np.int32)
        self._free = count

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return self._free

    @property
    def available(self) -> int:
        """Blocks that texts can get now."""
        return self._free + (0 if self.borrower is None else self.borrower.reclaimable)

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

    def take(self, count: int) -> Blocks | None:
        """The first `count` free blocks, for a text; None, and nothing changes, where so many are not available."""
        if count > self.available:
            return None
        if count > self._free:
            assert self.borrower is not None
            self.borrower.reclaim(count)
        found = np.flatnonzero(self._references == _FREE)[:count].astype(np.int32)
        self._references[found] = 1
        self._free -= count
        return found

    def release(self, blocks: Blocks) -> None:
        """A text no longer holds these blocks."""
        assert (self._references[blocks] > 0).all(), "a block is released that no text holds"
        self._references[blocks] -= 1
        self._free += int((self._references[blocks] == _FREE).sum())

    def borrow(self, count: int) -> int | None:
        """The first of `count` blocks in a row, from the end of the pool, where texts come last; None without such."""
        start = self._last_run(count)
        if start is not None:
            self._references[start : start + count] = _BORROWED
            self._free -= count
        return start

    def give_back(self, start: int, count: int) -> None:
        """The borrower no longer has this run."""
        assert (self._references[start : start + count] == _BORROWED).all(), "a block is given back that is not lent"
        self._references[start : start + count] = _FREE
        self._free += count

    def check_integrity(self, tables: list[Blocks]) -> None:
        """Raise AssertionError unless exactly the blocks of these texts are held, each as often as texts have it."""
        expected = np.zeros(self.count, np.int64)
        for table in tables:
            assert len(np.unique(table)) == len(table), "a text has a block twice"
            expected[table] += 1
        assert (np.maximum(self._references, 0) == expected).all(), "a block is lost, or held by a text that has ended"
        assert self._free == int((self._references == _FREE).sum()), "the number of free blocks is wrong"
        if self.borrower is not None:
            self.borrower.check_integrity()

    def _last_run(self, count: int) -> int | None:
        """The first block of the last `count` free blocks in a row."""
        taken = np.flatnonzero(self._references != _FREE)
        ends = np.append(taken, self.count)
        starts = np.append(-1, taken) + 1
        fitting = np.flatnonzero(ends - starts >= count)
        return int(ends[fitting[-1]] - count) if fitting.size else None
