"""The number of waiting rows that one engine call takes, and what a row costs that shares a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def row_costs(pack_ms: Sequence[float], pack_tokens: int, max_rows: int) -> list[float]:
    """Milliseconds of one row by its tokens: its share of a call that is full of such rows.

    pack_ms: of a call by its tokens in all, [longest + 1]; pack_tokens, max_rows: as of `rows_to_take`.
    """
    costs = [0.0]
    for tokens in range(1, len(pack_ms)):
        rows = max(1, min(max_rows, pack_tokens // tokens))
        costs.append(pack_ms[rows * tokens] / rows)
    return costs
