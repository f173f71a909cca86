"""The number of waiting rows that one engine call takes."""

from __future__ import annotations

from collections.abc import Iterable


def rows_to_take(lengths: Iterable[int], waiting: int, threads: int, tokens: int, max_rows: int) -> int:
    """The number of rows, from the head of the queue, that the next call takes.

    lengths: of the waiting rows in order of arrival (read only as far as needed); waiting: their number;
    threads: engine threads that share the queue; tokens: the efficient size of a pack; max_rows: row slots of a pack.
    The head is always taken. Further rows are taken in order while the pack stays within `tokens`, up to the thread's
    share of the queue: otherwise one thread could run two rows while another is idle.
    """
    share = min(max_rows, -(-waiting // threads))
    total = taken = 0
    for length in lengths:
        if taken and (taken >= share or total + length > tokens):
            break
        total += length
        taken += 1
        if taken >= share:
            break
    return taken
