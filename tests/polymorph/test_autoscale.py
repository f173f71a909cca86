"""Target tracking: the paper's 95 % and 50 % for 60 s, the victim, and the bounds."""

from __future__ import annotations

import pytest

from shapeshift.polymorph.policy.autoscale import Decision, Targets, decide


@pytest.mark.parametrize(
    ("p98", "below_s", "expected"),
    [
        (427.5, 0.0, Decision("out")),
        (427.4, 0.0, Decision("keep")),
        (900.0, 0.0, Decision("out")),
        (225.0, 60.0, Decision("keep")),
        (224.9, 59.9, Decision("keep")),
        (224.9, 60.0, Decision("in", 1)),
        (0.0, 600.0, Decision("in", 1)),
    ],
)
def test_the_papers_numbers(p98: float, below_s: float, expected: Decision) -> None:
    assert decide(p98, 450.0, below_s, [5, 2, 2, 9], 1, 8) == expected


def test_bounds() -> None:
    busy, idle = (500.0, 450.0, 0.0), (1.0, 450.0, 100.0)
    assert decide(*busy, [1, 1], 1, 2) == Decision("keep")
    assert decide(*idle, [1, 1], 2, 4) == Decision("keep")
    assert decide(*idle, [], 1, 4) == Decision("out")
    assert decide(*idle, [1], 2, 4) == Decision("out")
    assert decide(*busy, [3, 1, 2], 1, 2) == Decision("in", 1)
    with pytest.raises(ValueError, match="min_workers"):
        decide(*busy, [1], 3, 2)


def test_other_targets() -> None:
    assert decide(80.0, 100.0, 0.0, [0], 1, 2, Targets(out_share=0.8)) == Decision("out")
    assert decide(29.0, 100.0, 5.0, [0, 1], 1, 2, Targets(in_share=0.3, in_after_s=5.0)) == Decision("in", 0)
    for wrong in ({"in_share": 0.95}, {"in_share": -0.1}, {"in_after_s": -1.0}):
        with pytest.raises(ValueError, match="got"):
            Targets(**wrong)
