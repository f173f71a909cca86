"""Evictions, small batches of urgent queries, and what runs next."""

from __future__ import annotations

import numpy as np
import pytest
from token_models import PROFILES, profile

from shapeshift.token_adapt.adapter import ALGORITHMS, AdaptRules, Query, TokenAdapter
from shapeshift.token_adapt.batching import BatchRules
from shapeshift.token_adapt.costs import Costs
from shapeshift.token_adapt.interfaces import GammaProfile

GAMMAS = (-4, 0, 2)
ACCURACY = np.array([0.6, 0.8, 0.9])


def adapter(algorithm: str = "grid", size: int = 64, started: float = -1e9, **rules: object) -> TokenAdapter:
    made = AdaptRules(algorithm=algorithm, batching=BatchRules(size=size), **rules)  # type: ignore[arg-type]
    return TokenAdapter(Costs(PROFILES, GAMMAS, size), made, started)


def query(arrived: float, latency: float, utility: float = 1.0) -> Query:
    return Query(arrived, arrived + latency, utility, ACCURACY)


def test_with_time_enough_the_most_accurate_gamma_runs() -> None:
    made = adapter()
    made.add(query(0.0, 500.0))
    step = made.step(1.0)
    assert (len(step.queries), GAMMAS[step.gamma], step.evicted) == (1, 2, [])
    assert len(made) == 0
    assert made.step(2.0).queries == ()


def test_with_less_time_a_faster_one_runs_and_with_none_the_query_is_evicted() -> None:
    for left, gamma in ((1.6, 2), (1.4, 0), (0.9, -4)):
        made = adapter()
        made.add(query(0.0, 100.0))
        step = made.step(100.0 - left)
        assert GAMMAS[step.gamma] == gamma
    made = adapter()
    late, gone = query(0.0, 100.0), query(0.0, 60.0)
    made.add(late)
    made.add(gone)
    step = made.step(99.6)
    assert step.queries == () and set(step.evicted) == {late, gone}
    assert len(made) == 0


def test_a_margin_makes_deadlines_come_sooner() -> None:
    made = adapter(margin_ms=50.0)
    made.add(query(0.0, 100.0))
    assert GAMMAS[made.step(49.2).gamma] == -4
    made.add(query(0.0, 100.0))
    assert len(made.step(49.6).evicted) == 1


def test_urgent_queries_leave_a_batch_that_is_too_large_for_them() -> None:
    made = adapter()
    patient = [query(0.0, 90.0) for _ in range(60)]
    urgent = [query(0.0, 84.0) for _ in range(3)]
    for one in (*patient, *urgent):
        made.add(one)
    # 63 images take 3.65 ms at least, three of them 0.6.
    step = made.step(82.0)
    assert set(step.queries) == set(urgent) and step.evicted == []
    assert len(made) == 60


def test_of_urgent_queries_as_many_stay_together_as_make_their_deadline() -> None:
    made = adapter()
    crowd = [query(0.0, 100.0) for _ in range(40)]
    for one in crowd:
        made.add(one)
    step = made.step(98.6)
    assert 0 < len(step.queries) < 40
    assert 98.6 + made.costs.fastest(len(step.queries)) < 100.0 <= 98.6 + made.costs.fastest(len(step.queries) + 1)
    assert GAMMAS[step.gamma] == -4
    assert len(made) + len(step.queries) == 40


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_query_runs_once_or_is_evicted(algorithm: str) -> None:
    rng = np.random.default_rng(5)
    made = adapter(algorithm, size=8, started=0.0, few_batches=2, initial_ms=20.0)
    asked = [query(at, float(rng.uniform(1, 12)), float(rng.uniform(0, 1))) for at in np.sort(rng.uniform(0, 60, 300))]
    clock, brought, ended = 0.0, 0, []
    while brought < len(asked) or len(made):
        clock = max(clock, asked[brought].arrived) if not len(made) and brought < len(asked) else clock
        while brought < len(asked) and asked[brought].arrived <= clock:
            made.add(asked[brought])
            brought += 1
        step = made.step(clock)
        ended += [*step.queries, *step.evicted]
        assert step.queries or not len(made), "queries are left and nothing runs"
        if step.queries:
            assert len(step.queries) <= 8
            clock += float(made.costs.times([len(step.queries)])[0, step.gamma])
            assert all(clock < one.deadline for one in step.queries)
    assert len(ended) == len(set(ended)) == len(asked)


def test_worthless_queries_run_when_nothing_else_waits() -> None:
    made = adapter()
    made.add(query(0.0, 100.0, utility=0.0))
    assert len(made.step(0.0).queries) == 1


def test_the_worthier_batch_runs_where_one_must_wait_too_long() -> None:
    made = adapter()
    cheap, dear = query(0.0, 1.6, 0.1), query(0.0, 1.7, 1.0)
    made.add(cheap)
    made.add(dear)
    # They differ in utility by more than mu, and both together are not to be had at any gamma but the fastest.
    first = made.step(0.9)
    assert first.queries == [dear]


def test_memory_bars_gammas() -> None:
    profiles = {-4: profile(-4), 2: GammaProfile(2, 18, {1: 1.0}, 3.0)}
    for memory_mb, gamma in ((3.5, 2), (3.0, -4)):
        made = TokenAdapter(Costs(profiles, (-4, 2), 64), AdaptRules(memory_mb=memory_mb), 0.0)
        made.add(Query(0.0, 500.0, 1.0, np.array([0.5, 0.9])))
        assert made.costs.gammas[made.step(0.0).gamma] == gamma


def test_the_papers_scheme_goes_by_rate_at_first_and_where_few_batches_wait() -> None:
    made = adapter("paper", started=0.0, few_batches=0, initial_ms=100.0)
    made.add(query(0.0, 500.0, utility=0.9))
    assert GAMMAS[made.step(10.0).gamma] == 2, "worth more than kappa: the greatest gamma"
    quiet = adapter("by_rate")
    quiet.add(query(0.0, 500.0, utility=0.5))
    assert GAMMAS[quiet.step(0.0).gamma] == 2
    busy = adapter("by_rate")
    for _ in range(60_000):
        busy.rate.add(0.0)
    busy.add(query(0.0, 500.0, utility=0.5))
    assert GAMMAS[busy.step(0.0).gamma] == -4


def test_queries_can_be_taken_out() -> None:
    made = adapter()
    kept, gone = query(0.0, 100.0), query(0.0, 100.0)
    made.add(kept)
    made.add(gone)
    assert made.remove(lambda one: one is gone) == [gone]
    assert made.remove(lambda one: one is gone) == []
    assert made.step(0.0).queries == [kept]


def test_what_arrived_long_ago_is_forgotten() -> None:
    made = adapter("infaas")
    for at in range(0, 10_000, 10):
        made.add(query(float(at), 1.0))
        made.step(float(at) + 50.0)
    assert len(made) == 0
    assert len(made.rate) <= 100
