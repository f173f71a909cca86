"""The INFaaS baseline: the fullest instance with room, and headroom scaling."""

from __future__ import annotations

import pytest

from shapeshift.polymorph.policy.baselines.binpacking import Headroom, pack, scale
from shapeshift.polymorph.policy.dispatch import Instance, Level


def test_the_fullest_instance_with_free_capacity_wins() -> None:
    levels = [
        Level(100, (Instance(1, 3, 10), Instance(2, 10, 10))),
        Level(200, (Instance(3, 4, 5), Instance(4, 8, 10))),
        Level(300, (Instance(5, 0, 10),)),
    ]
    assert pack(50, levels) == (1, 3)
    assert pack(201, levels) == (2, 5)
    assert pack(301, levels) is None


def test_with_all_full_the_least_full_wins() -> None:
    levels = [Level(100, (Instance("a", 15, 10), Instance("b", 13, 10))), Level(200, (Instance("c", 13, 10),))]
    assert pack(50, levels) == (0, "b")


def test_ties_go_to_the_shortest_level_then_the_lowest_id() -> None:
    levels = [Level(100, (Instance(7, 5, 10), Instance(2, 5, 10))), Level(200, (Instance(1, 5, 10),))]
    assert pack(50, levels) == (0, 2)


def test_headroom() -> None:
    assert scale(95.0, 10.0, 10, 1, 40) == (10, 0)
    assert scale(95.1, 10.0, 10, 1, 40) == (11, 0)
    assert scale(190.0, 10.0, 10, 1, 40) == (20, 0)
    assert scale(900.0, 10.0, 10, 1, 40) == (40, 0)
    workers, since = 10, 0
    for decision in range(10):
        assert workers == 10, decision
        workers, since = scale(85.5, 10.0, workers, 1, 40, since)
    assert (workers, since) == (9, 0)


def test_headroom_bounds() -> None:
    assert scale(0.0, 10.0, 50, 1, 40) == (40, 0)
    assert scale(0.0, 10.0, 3, 4, 40) == (4, 0)
    assert scale(0.0, 10.0, 4, 4, 40, spare_since=100) == (4, 0)
    assert scale(85.5, 10.0, 10, 1, 40, 0, Headroom(0.05, 1)) == (9, 0)
    with pytest.raises(ValueError, match="min_workers"):
        scale(1.0, 1.0, 1, 3, 2)
    with pytest.raises(ValueError, match="capacity"):
        scale(1.0, 0.0, 1, 1, 2)
    for wrong in ({"share": 1.0}, {"in_after": 0}):
        with pytest.raises(ValueError, match="got"):
            Headroom(**wrong)
