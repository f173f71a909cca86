"""Which node serves a request."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from shapeshift.fleet.policy.placement import UNREAD_MARGIN, least_unread, least_work

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


def test_a_key_has_one_node_while_no_other_has_clearly_less_to_read() -> None:
    idle = dict.fromkeys(NODES, 0.0)
    keys = [f"adapter-{number}" for number in range(400)]
    first = {key: least_unread(key, idle) for key in keys}
    assert {key: least_unread(key, {**idle, "b": UNREAD_MARGIN - 1}) for key in keys} == first
    shares = Counter(first.values())
    assert max(shares.values()) < 1.5 * len(keys) / len(NODES)


def test_a_node_that_leaves_moves_only_its_own_keys() -> None:
    idle = dict.fromkeys(NODES, 0.0)
    left = {node: tokens for node, tokens in idle.items() if node != "c"}
    for key in map(str, range(200)):
        before, after = least_unread(key, idle), least_unread(key, left)
        assert before in (after, "c")


def test_a_home_with_much_to_read_gives_a_key_to_the_node_with_the_least() -> None:
    home = least_unread("k", dict.fromkeys(NODES, 0.0))
    others = [node for node in NODES if node != home]
    for least in others:
        unread = {**dict.fromkeys(NODES, 300.0), home: 100.0 + UNREAD_MARGIN, least: 100.0}
        assert least_unread("k", unread) == least
        assert least_unread("k", {**unread, home: 99.0 + UNREAD_MARGIN}) == home


def test_of_two_nodes_with_the_least_the_key_s_next_one_is_chosen() -> None:
    home = least_unread("k", dict.fromkeys(NODES, 0.0))
    rest = {node: 0.0 for node in NODES if node != home}
    assert least_unread("k", {**rest, home: UNREAD_MARGIN}) == least_unread("k", rest)


def test_no_node_has_more_to_read_than_the_margin_and_a_prompt_above_another() -> None:
    unread = dict.fromkeys(NODES, 0.0)
    rng = np.random.default_rng(7)
    for key, prompt in zip(
        rng.choice(["hot", "x", "y"], 400, p=[0.6, 0.3, 0.1]), rng.integers(1, 500, 400), strict=True
    ):
        unread[least_unread(str(key), unread)] += prompt
        assert max(unread.values()) - min(unread.values()) < UNREAD_MARGIN + 500
