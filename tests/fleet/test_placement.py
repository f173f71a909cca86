"""Which node serves a request."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from shapeshift.fleet.policy.placement import BOUND, bounded_affinity, least_work

NODES = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ({"a": 0.0, "b": 0.0}, "a"),
        ({"a": 1.0, "b": 0.0}, "a"),
        ({"a": 2.0, "b": 0.0}, "b"),
        ({"a": 20.0, "b": 16.0}, "a"),
        ({"a": 20.0, "b": 15.0, "c": 14.0}, "c"),
        ({"a": 3.0, "c": 1.0, "b": 1.0}, "b"),
        ({"a": 5.0}, "a"),
    ],
)
def test_a_request_leaves_only_for_clearly_less_work(loads: dict[str, float], chosen: str) -> None:
    assert least_work(loads, "a") == chosen


def test_a_key_has_one_node_while_that_is_not_loaded() -> None:
    idle = dict.fromkeys(NODES, 0.0)
    keys = [f"adapter-{number}" for number in range(400)]
    first = {key: bounded_affinity(key, idle) for key in keys}
    assert {key: bounded_affinity(key, {**idle, "b": 3.0}, free=4.0) for key in keys} == first
    shares = Counter(first.values())
    assert max(shares.values()) < 1.5 * len(keys) / len(NODES)


def test_a_node_that_leaves_moves_only_its_own_keys() -> None:
    idle = dict.fromkeys(NODES, 0.0)
    left = {node: load for node, load in idle.items() if node != "c"}
    for key in map(str, range(200)):
        before, after = bounded_affinity(key, idle), bounded_affinity(key, left)
        assert before in (after, "c")


def test_no_node_is_loaded_above_the_bound() -> None:
    loads = dict.fromkeys(NODES, 0.0)
    rng = np.random.default_rng(7)
    # One adapter in two requests is the same.
    for total, key in enumerate(rng.choice(["hot", "x", "y", "z"], 400, p=[0.5, 0.2, 0.2, 0.1]), start=1):
        loads[bounded_affinity(str(key), loads)] += 1
        assert max(loads.values()) <= math.ceil(BOUND * total / len(NODES))


def test_a_full_node_gives_a_key_to_the_next_in_its_order() -> None:
    idle = dict.fromkeys(NODES, 0.0)
    home = bounded_affinity("k", idle)
    second = bounded_affinity("k", {**idle, home: 9.0})
    assert second != home
    assert bounded_affinity("k", {node: 0.0 for node in NODES if node != home}) == second
