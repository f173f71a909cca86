"""The papers' figures in simulation: small runs, and what becomes of a claim."""

from __future__ import annotations

import numpy as np
import pytest

from bench.papers import findings
from bench.papers.__main__ import PAPERS
from bench.polymorph.fleet import LatencyCurve
from bench.polymorph.schemes import OURS, PAPER, System
from bench.polymorph.traces import Traffic, capacity_per_s

CURVE = LatencyCurve((64, 512), (5.0, 25.0))


@pytest.mark.parametrize(
    ("held", "verdict"), [((True, True), "yes"), ((True, False), "in part"), ((False, False), "no")]
)
def test_a_claim_holds_where_each_part_does(held: tuple[bool, ...], verdict: str) -> None:
    assert findings.verdict(*held) == verdict


def test_one_engine_for_any_length_takes_its_factor_longer() -> None:
    trace = Traffic(0.01, duration_s=20.0).draw(capacity_per_s(CURVE, (64, 512), 4), 0)
    static, dynamic = (System(OURS, (512,), factor).over(CURVE, 4, trace) for factor in (0.0, 2.0))
    assert np.median(static.latency_ms) == pytest.approx(25.0)
    assert np.median(dynamic.latency_ms) == pytest.approx(2.0 * CURVE.at(int(np.median(trace.length))), rel=0.02)


def test_more_workers_than_a_machine_has_are_spread() -> None:
    trace = Traffic(0.5, duration_s=0.5).draw(capacity_per_s(CURVE, (64, 512), 300), 0)
    served = System(PAPER, (64, 512)).over(CURVE, 300, trace)
    assert sum(served.plans[0][1]) == 300 and served.mean_workers == 300
    assert np.isfinite(served.latency_ms).all()


def test_the_published_verdicts_cover_every_paper() -> None:
    claims = findings.claims()
    assert {claim.paper.lower() for claim in claims} == PAPERS.keys() - {"scale"}
    assert {claim.holds for claim in claims} <= {findings.YES, findings.PARTLY, findings.NO, findings.OTHER}
    assert [row["workers"] for row in findings.rows("latency")] == [10, 100, 1_000, 10_000]
