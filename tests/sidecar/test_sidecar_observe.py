"""Traffic between two scrapes, from recorded and from hand-made metrics pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shapeshift.sidecar import observe
from shapeshift.sidecar.observe import HEARTBEAT, LATENCIES, LENGTHS, MetricsPage
from shapeshift.triton import metrics
from tests.sidecar.fakes import cumulative, page, samples

PAGES = Path(__file__).parent / "pages"
BOUNDS = (10.0, 50.0, 100.0, 150.0, 285.0, 300.0)


def recorded(second: int) -> MetricsPage:
    """A page of a real server, recorded once a second: 100 + 30 + 20 texts arrive after second 1."""
    return MetricsPage(metrics.parse((PAGES / f"second_{second:02d}.txt").read_text()), float(second))


def test_traffic_of_a_recorded_front() -> None:
    traffic = observe.traffic_of(["enc"], recorded(1), recorded(3))
    assert {bound: count for bound, count in traffic.texts.items() if count} == {32.0: 100.0, 128.0: 30.0, 512.0: 20.0}
    assert traffic.offered == 150
    assert traffic.answered == 150
    assert traffic.p98_ms is not None
    assert 285 < traffic.p98_ms <= 300
    assert (traffic.waiting, traffic.running) == (3, 2)
    assert traffic.outstanding == {"enc_w00": 4, "enc_w01": 1}
    assert traffic.timeouts == {"enc_w00": 0, "enc_w01": 0}
    assert traffic.seconds == 2.0
    assert len(traffic.live_pids) == 1
    assert traffic.missing == ()


def test_traffic_of_the_real_backend() -> None:
    traffic = observe.traffic_of(["encode"], recorded(0), recorded(11))
    assert (traffic.offered, traffic.answered) == (12, 3)
    # Three times four texts: with one word, six, sixty and four hundred words.
    assert {bound: count for bound, count in traffic.texts.items() if count} == {8.0: 6.0, 64.0: 3.0, 408.0: 3.0}
    assert traffic.p98_ms is not None
    assert traffic.missing == ()


def test_no_traffic_between_equal_pages() -> None:
    traffic = observe.traffic_of(["enc"], recorded(5), recorded(5))
    assert traffic.offered == 0
    assert traffic.p98_ms is None
    assert traffic.live_pids == frozenset()


def test_a_missing_model_exports_nothing() -> None:
    traffic = observe.traffic_of(["absent"], recorded(0), recorded(2))
    assert traffic.missing == (HEARTBEAT, LENGTHS, LATENCIES)
    assert traffic.offered == traffic.answered == 0


def test_only_processes_with_moving_heartbeats_are_alive() -> None:
    assert observe.was_alive("enc_w00", recorded(5), recorded(7))
    assert not observe.was_alive("enc_w01", recorded(5), recorded(7))


def test_a_new_process_counts_from_zero() -> None:
    old = page(0.0, samples("enc", 1, 50, lengths=cumulative({32: 1000, 512: 10})))
    new = page(
        100.0,
        samples("enc", 1, 90, lengths=cumulative({32: 1300, 512: 10})),
        samples("enc", 2, 10, lengths=cumulative({32: 40, 512: 2})),
    )
    assert observe.traffic_of(["enc"], old, new).texts == {32.0: 340.0, 512.0: 2.0, float("inf"): 0.0}


def test_a_counter_that_fell_counts_from_zero() -> None:
    old = page(0.0, samples("enc", 7, 50, lengths=cumulative({32: 1000, 512: 10})))
    new = page(10.0, samples("enc", 7, 3, lengths=cumulative({32: 5, 512: 100})))
    assert observe.traffic_of(["enc"], old, new).offered == 105


def test_time_while_the_front_was_dead_is_excluded() -> None:
    old = page(0.0, samples("enc", 1, 50))
    new = page(100.0, samples("enc", 1, 60), samples("enc", 2, 20))
    assert observe.traffic_of(["enc"], old, new).seconds == 30
    steady = page(100.0, samples("enc", 1, 147))
    assert observe.traffic_of(["enc"], old, steady).seconds == 100


def test_gauges_of_dead_processes_are_excluded() -> None:
    old = page(0.0, samples("enc", 1, 50), samples("enc", 2, 1))
    new = page(
        10.0,
        samples("enc", 1, 50, outstanding={"enc_w00": 9}, waiting={"": 5}),
        samples("enc", 2, 11, outstanding={"enc_w00": 2}, waiting={"": 1}),
    )
    traffic = observe.traffic_of(["enc"], old, new)
    assert (traffic.outstanding, traffic.waiting, traffic.live_pids) == ({"enc_w00": 2}, 1, frozenset({2}))


def test_a_scrape_between_two_bucket_updates_counts_nothing_twice() -> None:
    torn = {"32": 20.0, "128": 12.0, "512": 15.0, "+Inf": 15.0}
    new = page(10.0, samples("enc", 1, 10, lengths=torn))
    counts = observe.histogram("enc", LENGTHS, page(0.0), new)
    assert counts == {32.0: 20.0, 128.0: 0.0, 512.0: 0.0, float("inf"): 0.0}


def test_invalid_labels_and_values_are_ignored() -> None:
    text = (
        'shapeshift_heartbeat_total{model="a",pid="12"} 5\n'
        'shapeshift_heartbeat_total{model="a",pid="none"} 5\n'
        'shapeshift_heartbeat_total{pid="13"} 5\n'
        'shapeshift_heartbeat_total{model="b",pid="14"} NaN\n'
        'shapeshift_request_tokens_bucket{model="a",pid="12",le="many"} 3\n'
    )
    found = MetricsPage(metrics.parse(text), 0.0)
    assert found.heartbeats() == {"a": {12: 5.0}}
    assert observe.histogram("a", LENGTHS, page(0.0), found) == {}


@pytest.mark.parametrize("seed", range(30))
def test_quantile_lies_in_the_bucket_of_the_true_one(seed: int) -> None:
    source = random.Random(seed)
    values = sorted(source.lognormvariate(4, 1) for _ in range(source.randint(1, 400)))
    counts = dict.fromkeys([*BOUNDS, float("inf")], 0.0)
    for value in values:
        counts[min(bound for bound in counts if value <= bound)] += 1
    found = observe.quantile(counts, 0.98)
    exact = values[min(int(0.98 * len(values)), len(values) - 1)]
    assert found is not None
    for bound in BOUNDS:
        # The estimate is above the bound if and only if more than 2% of the values are.
        above = sum(value > bound for value in values)
        assert (found > bound) == (above > 0.02 * len(values) + 1e-9) or bound == BOUNDS[-1], (bound, exact)


def test_quantile_without_observations_is_none() -> None:
    assert observe.quantile({}, 0.98) is None
    assert observe.quantile({10.0: 0.0}, 0.98) is None
    assert observe.quantile({10.0: 0.0, float("inf"): 5.0}, 0.98) == 10.0


def test_a_technique_at_work_is_seen_of_living_processes() -> None:
    text = (
        'shapeshift_engine_used_total{model="e",pid="7",engine="64"} 3\n'
        'shapeshift_engine_seconds_total{model="e",pid="7",engine="64"} 0.5\n'
        'shapeshift_engine_used_total{model="e",pid="6",engine="64"} 9\n'
        'shapeshift_engine_used_total{model="e",pid="7",engine="any"} 0\n'
        'shapeshift_level_texts_total{model="e",pid="7",level="2"} 5\n'
    )
    found = observe.work_of(MetricsPage(metrics.parse(text), 0.0), "e", [7])
    assert found == {"calls of engine 64": 3.0, "s in engine 64": 0.5, "texts ended at level 2": 5.0}
