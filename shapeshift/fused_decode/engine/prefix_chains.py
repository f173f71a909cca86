"""The hashes of the blocks that each slot's text has filled, by which other texts find and share them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.engine.blocks import BlockPool, block_hash, first_hash
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS

Integers = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]


class PrefixChains:
    """The chain of hashes of each slot: a block's hash is of all tokens up to its end, and of the adapter.

    tokens  INT32 [slots, max_length + 1]  the texts, which the slots' owner changes
    """

    def __init__(self, slots: int, pool: BlockPool, tokens: Places) -> None:
        self._pool = pool
        self._tokens = tokens
        self._hashes: list[list[bytes]] = [[] for _ in range(slots)]
        # Blocks that the pool knows already: shared ones, and those that were remembered.
        self._known = np.zeros(slots, np.int64)

    def chain(self, slot: int, count: int, adapter: int) -> list[bytes]:
        """The hashes of the first `count` blocks of the text in `slot`, computed with `adapter`."""
        hashes = self._hashes[slot]
        add_hashes(hashes, self._tokens[slot], count, adapter)
        return hashes[:count]

    def shared(self, slot: int, count: int) -> None:
        """The first `count` blocks of `slot` are those of other texts."""
        self._known[slot] = count

    def remember(self, slots: Integers, full: Integers, blocks: Places, adapters: Places) -> None:
        """Let other texts share the first `full`, INT64 [n], blocks of these slots.

        blocks, adapters: of all slots, as in `SlotTable`.
        """
        more = full > self._known[slots]
        for slot, count in zip(slots[more].tolist(), full[more].tolist(), strict=True):
            hashes = self.chain(slot, count, int(adapters[slot]))
            for place in range(int(self._known[slot]), count):
                self._pool.remember(int(blocks[slot, place]), hashes[place])
            self._known[slot] = count

    def fork(self, source: int, target: int, full: int) -> None:
        """The text in `target` becomes that in `source`, of which `full` blocks are full."""
        self._hashes[target] = self._hashes[source][:full]
        self._known[target] = self._known[source]

    def clear(self, slot: int) -> None:
        """The text in `slot` is gone."""
        self._hashes[slot] = []
        self._known[slot] = 0


def add_hashes(hashes: list[bytes], text: Places, count: int, adapter: int) -> None:
    """Go on with the `hashes` of the first blocks of `text`, INT32 [tokens], until there are `count`."""
    last = hashes[-1] if hashes else first_hash(adapter)
    for place in range(len(hashes), count):
        last = block_hash(last, text[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
        hashes.append(last)
