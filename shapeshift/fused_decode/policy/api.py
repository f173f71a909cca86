"""The policies of this technique as JSON."""

from __future__ import annotations

from typing import Any

from shapeshift.fused_decode.policy.compact import compact
from shapeshift.policy_api import Policy, list_of, number


def _compact(slots: list[float]) -> dict[str, Any]:
    result = compact(slots)
    return {"offset": result.offset, "cost": result.cost, "moves": [list(move) for move in result.moves]}


POLICIES = (
    Policy(
        "fused_decode.compact",
        "which slots move so that the running requests are contiguous",
        _compact,
        {"slots": list_of(number(minimum=0), min_length=1)},
    ),
)
