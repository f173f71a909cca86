"""The comparison of one plan for all nodes with a plan for each."""

from __future__ import annotations

import numpy as np

from bench.fleet import drift
from bench.polymorph.traces import Traffic


def test_both_ways_serve_the_same_requests_and_one_plan_serves_them_sooner() -> None:
    together, apart = drift.latencies(Traffic(0.7, drift=0.1, drift_s=20.0, duration_s=20.0), seed=0)
    assert len(together) == len(apart) > 1000
    assert together.min() > 0
    assert apart.min() > 0
    assert np.percentile(together, 98) < np.percentile(apart, 98)
