"""What the overload benchmark makes of a replay."""

from __future__ import annotations

import numpy as np

from bench.encode.overload import missed, summarise
from client.report import Report


def report(*outcomes: tuple[str, float]) -> Report:
    """Requests due every 100 ms; of each its kind and its latency in seconds."""
    intended = np.arange(len(outcomes)) * 0.1
    done = intended + np.array([latency_s for _, latency_s in outcomes])
    return Report(intended, intended, done, np.array([kind for kind, _ in outcomes]), {}, 0.0)


def test_refusals_and_answers_are_held_against_their_bounds() -> None:
    overload = summarise(report(("OK", 1.9), ("UNAVAILABLE", 0.04), ("OK", 0.2), ("UNAVAILABLE", 0.01)))
    assert (overload["good"], overload["refused"], overload["other"]) == (2, 2, 0)
    assert abs(overload["good_max_ms"] - 1900.0) < 1e-6 and 39.0 < overload["refusal_p99_ms"] <= 40.0
    assert abs(overload["offered_per_s"] - 10.0) < 1e-6 and overload["late_p99_ms"] == 0
    assert list(missed(overload)) == []


def test_each_demand_that_does_not_hold_is_named() -> None:
    lines = list(missed(summarise(report(("OK", 2.5), ("UNAVAILABLE", 0.06), ("DEADLINE_EXCEEDED", 30.0)))))
    assert len(lines) == 3
    assert "refusals within 60 ms" in lines[0] and "answers within 2500 ms" in lines[1] and "1 requests" in lines[2]


def test_a_load_without_refusals_has_nothing_to_hold() -> None:
    assert list(missed(summarise(report(("OK", 0.1), ("OK", 0.1))))) == []
