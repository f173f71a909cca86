"""How many waiting rows one engine call takes."""

from __future__ import annotations

from collections.abc import Iterable


def rows_to_take(lengths: Iterable[int], waiting: int, workers: int, tokens: int, max_rows: int) -> int:
    """How many rows, from the head of the queue, the next call takes.

    lengths: of the waiting rows in order of arrival (read only as far as needed); waiting: their number;
    workers: threads that share the queue; tokens: the efficient size of a pack; max_rows: slots in one.
    The head is always taken. More follow in order, up to a worker's fair share (so that no other worker
    idles while one carries two rows) and while the pack stays within `tokens`.
    """
    share = min(max_rows, -(-waiting // workers))
    total = taken = 0
    for length in lengths:
        if taken and (taken >= share or total + length > tokens):
            break
        total += length
        taken += 1
        if taken >= share:
            break
    return taken
