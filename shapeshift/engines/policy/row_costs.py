"""What one text costs by the profile, where others share its engine call."""

from __future__ import annotations

from collections.abc import Sequence


def row_costs(pack_ms: Sequence[float], pack_tokens: int, max_rows: int) -> list[float]:
    """Milliseconds of one row by its tokens: its share of a call that is full of such rows.

    pack_ms: of a call by its tokens in all, [longest + 1]; pack_tokens, max_rows: as of `pack_size.rows_to_take`.
    """
    costs = [0.0]
    for tokens in range(1, len(pack_ms)):
        rows = max(1, min(max_rows, pack_tokens // tokens))
        costs.append(pack_ms[rows * tokens] / rows)
    return costs
