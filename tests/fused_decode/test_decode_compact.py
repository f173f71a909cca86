"""Compaction, compared with a search through all windows and all orders of moves."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.policy.api import POLICIES
from shapeshift.fused_decode.policy.compact import compact

(POLICY,) = POLICIES


def lie_together(slots: tuple[int, ...]) -> bool:
    held = [slot for slot, weight in enumerate(slots) if weight]
    return not held or held[-1] - held[0] + 1 == len(held)


def fewest_moves(slots: tuple[int, ...]) -> int:
    """By breadth-first search over single moves."""
    seen, queue = {slots}, deque([(slots, 0)])
    while queue:
        state, moves = queue.popleft()
        if lie_together(state):
            return moves
        for source, target in itertools.permutations(range(len(state)), 2):
            if state[source] and not state[target]:
                after = list(state)
                after[source], after[target] = 0, after[source]
                if tuple(after) not in seen:
                    seen.add(tuple(after))
                    queue.append((tuple(after), moves + 1))
    raise AssertionError


def apply(slots: Sequence[float], moves: tuple[tuple[int, int], ...]) -> list[float]:
    made = list(slots)
    for source, target in moves:
        assert made[source] and not made[target]
        made[source], made[target] = 0, made[source]
    return made


def test_no_order_of_single_moves_needs_fewer() -> None:
    for length in range(1, 8):
        for slots in itertools.product((0, 1), repeat=length):
            found = compact(slots)
            assert len(found.moves) == found.cost == fewest_moves(slots)
            assert lie_together(tuple(int(weight) for weight in apply(list(slots), found.moves)))


def test_weights_move_as_little_as_any_window_lets_them() -> None:
    rng = random.Random(0)
    for _ in range(500):
        slots = [rng.choice((0, 0, 1, 2, 5, 400)) for _ in range(rng.randint(1, 24))]
        width = sum(weight > 0 for weight in slots)
        costs = [sum(slots) - sum(slots[at : at + width]) for at in range(len(slots) - width + 1)]
        found = compact(slots)
        assert found.cost == min(costs) and found.offset == costs.index(min(costs))
        assert sum(slots[source] for source, _ in found.moves) == found.cost
        after = apply(slots, found.moves)
        assert all(after[found.offset : found.offset + width]) and sum(after) == sum(slots)
        for ends in zip(*found.moves, strict=True):
            assert list(ends) == sorted(ends)


# Slots, and where the printed Algorithm 3 goes wrong because it never considers offset 0.
EXAMPLES = [
    ([0, 0, 0], {"offset": 0, "cost": 0, "moves": []}),
    ([1, 1, 1], {"offset": 0, "cost": 0, "moves": []}),
    ([1, 1, 1, 0, 0], {"offset": 0, "cost": 0, "moves": []}),
    ([0, 1, 1], {"offset": 1, "cost": 0, "moves": []}),
    ([1, 0, 1, 1], {"offset": 0, "cost": 1, "moves": [[3, 1]]}),
    ([5, 0, 1, 0, 1], {"offset": 0, "cost": 1, "moves": [[4, 1]]}),
    ([1, 0, 0, 7, 0, 1, 0], {"offset": 3, "cost": 1, "moves": [[0, 4]]}),
    ([0.5], {"offset": 0, "cost": 0, "moves": []}),
]


@pytest.mark.parametrize(("slots", "answer"), EXAMPLES)
def test_by_hand(slots: list[float], answer: dict[str, object]) -> None:
    assert POLICY.evaluate({"slots": slots}) == answer


@pytest.mark.parametrize("slots", [[], [-1], [1, "2"], [float("nan")], [True], 3])
def test_an_invalid_list_of_weights_is_refused(slots: object) -> None:
    with pytest.raises(InvalidInputError, match="slots"):
        POLICY.evaluate({"slots": slots})
