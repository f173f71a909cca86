"""How full nodes may be before one is one too many, value by value."""

from __future__ import annotations

import pytest

from shapeshift.fleet.policy.node_count import NodeUse, wanted_nodes
from shapeshift.polymorph.policy import autoscale

SHARE = autoscale.PAPER.in_share


@pytest.mark.parametrize(
    ("latency", "occupancy", "known", "most"),
    [
        (None, None, False, 0.0),
        (0.2, None, True, 0.2),
        (None, 0.3, True, 0.3),
        (0.2, 0.3, True, 0.3),
        (0.4, 0.3, True, 0.4),
    ],
)
def test_the_larger_of_what_is_known_counts(
    latency: float | None, occupancy: float | None, known: bool, most: float
) -> None:
    use = NodeUse(latency, occupancy)
    assert (use.is_known, use.most) == (known, most)


@pytest.mark.parametrize(
    ("use", "nodes", "fast"),
    [
        (NodeUse(0.0, None), 2, True),
        (NodeUse(0.0, None), 1, False),
        (NodeUse(None, None), 3, False),
        (NodeUse(SHARE, None), 2, False),
        (NodeUse(SHARE - 0.01, None), 2, True),
        # What one of two nodes holds doubles on the other; of three each gets half of it.
        (NodeUse(None, SHARE / 2 - 0.01), 2, True),
        (NodeUse(None, SHARE / 2), 2, False),
        (NodeUse(None, SHARE / 2 + 0.01), 3, True),
        (NodeUse(None, SHARE * 2 / 3 + 0.001), 3, False),
        (NodeUse(SHARE, 0.0), 3, False),
    ],
)
def test_a_node_is_one_too_many_where_the_others_have_room(use: NodeUse, nodes: int, fast: bool) -> None:
    assert use.is_fast(nodes) is fast


def test_what_is_not_known_changes_nothing() -> None:
    assert [wanted_nodes(NodeUse(None, None), 10_000.0, nodes) for nodes in (1, 2, 7)] == [1, 2, 7]
