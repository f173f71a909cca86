from __future__ import annotations

import gc
import os
import time
import weakref
from functools import partial

import pytest

from shapeshift.serving.metrics import (
    Counter,
    Counters,
    Gauge,
    Gauges,
    Histogram,
    Info,
    Metric,
    MetricsFlusher,
    RequestMetrics,
)
from tests.fakes import PbUtils
from tests.waiting import wait_for

NEVER_S = 1e6


def flusher(pb_utils: PbUtils, *metrics: Metric, period_s: float = NEVER_S) -> MetricsFlusher:
    return MetricsFlusher(pb_utils, "m", metrics, pytest.fail, period_s)


def test_histogram_is_cumulative_and_bounds_are_inclusive() -> None:
    histogram = Histogram("h", "help", [8, 16, 24])
    for value in (1, 8, 8.5, 16, 24, 25, 1000):
        histogram.observe(value)
    assert histogram.totals() == ([2, 4, 5, 7], 1082.5)


def test_histogram_as_prometheus_has_it() -> None:
    pb_utils = PbUtils()
    histogram = Histogram("tokens", "help", [0.5, 8, 1000])
    for value in (0.2, 7, 7, 5000):
        histogram.observe(value)
    own = flusher(pb_utils, histogram)
    own.flush()
    buckets = {le: pb_utils.metric("shapeshift_tokens_bucket", le=le) for le in ("0.5", "8", "1000", "+Inf")}
    assert buckets == {"0.5": 1, "8": 3, "1000": 3, "+Inf": 4}
    assert pb_utils.metric("shapeshift_tokens_sum") == 5014.2
    assert pb_utils.metric("shapeshift_tokens_count") == 4
    own.close()


def test_the_bounds_of_lengths_and_latencies() -> None:
    """The longest length is in the last bound; half of the objective and 95% of it are bounds, in milliseconds."""
    metrics = RequestMetrics("texts", 20, 80.0)
    assert metrics.lengths.bounds == [8, 16, 24]
    assert set(metrics.latency_ms.bounds) - set(RequestMetrics("texts", 20, 0).latency_ms.bounds) == {40.0, 76.0}
    assert metrics.latency_ms.bounds == sorted(metrics.latency_ms.bounds)


def test_only_differences_are_added() -> None:
    pb_utils = PbUtils()
    counter, histogram = Counter("c_total", "help"), Histogram("h", "help", [10])
    own = flusher(pb_utils, counter, histogram)
    for expected in (1, 2, 3):
        counter.add()
        histogram.observe(5)
        for _ in range(2):
            own.flush()
        assert pb_utils.metric("shapeshift_c_total") == expected
        assert pb_utils.metric("shapeshift_h_count") == expected
        assert pb_utils.metric("shapeshift_h_sum") == 5 * expected
    own.close()
    assert pb_utils.metric("shapeshift_c_total") == 3


def test_series_exist_before_they_count() -> None:
    pb_utils = PbUtils()
    own = flusher(pb_utils, Counter("c_total", "help"), Histogram("h", "help", [1]), Gauge("g", "help", lambda: 0))
    own.flush()
    assert pb_utils.metric("shapeshift_c_total") == pb_utils.metric("shapeshift_h_bucket", le="+Inf") == 0
    assert pb_utils.metric("shapeshift_g") == 0
    own.close()


def test_labels_keep_series_apart() -> None:
    pb_utils = PbUtils()
    good, bad = (Counter("answers_total", "help", {"code": code}) for code in ("OK", "INTERNAL"))
    good.add(3)
    bad.add()
    own = flusher(pb_utils, good, bad)
    own.flush()
    pid = str(os.getpid())
    assert pb_utils.metric("shapeshift_answers_total", code="OK", model="m", pid=pid) == 3
    assert pb_utils.metric("shapeshift_answers_total", code="INTERNAL", model="m", pid=pid) == 1
    own.close()


def test_what_is_read_at_each_flush() -> None:
    pb_utils = PbUtils()
    now = {"gauge": 7.0, "counter": 2.0}
    own = flusher(
        pb_utils,
        Gauge("g", "help", lambda: now["gauge"]),
        Counter("c_total", "help", read=lambda: now["counter"]),
    )
    own.flush()
    now.update(gauge=1.0, counter=5.0)
    own.flush()
    assert (pb_utils.metric("shapeshift_g"), pb_utils.metric("shapeshift_c_total")) == (1, 5)
    own.close()


def test_the_heart_beats_and_close_flushes_once_more() -> None:
    pb_utils = PbUtils()
    counter = Counter("c_total", "help")
    own = flusher(pb_utils, counter, period_s=0.01)
    wait_for(lambda: any(name == "shapeshift_heartbeat_total" and value >= 3 for (name, _), value in series(pb_utils)))
    counter.add(5)
    own.close()
    assert pb_utils.metric("shapeshift_c_total") == 5
    last = pb_utils.metric("shapeshift_heartbeat_total", model="m")
    time.sleep(0.05)
    assert pb_utils.metric("shapeshift_heartbeat_total") == last


def series(pb_utils: PbUtils) -> list[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
    return list(dict(pb_utils.metrics).items())


def test_families_live_as_long_as_the_process() -> None:
    pb_utils = PbUtils()
    counter = Counter("c_total", "help")
    own = flusher(pb_utils, counter)
    own.flush()
    gc.collect()
    counter.add()
    own.flush()
    assert pb_utils.metric("shapeshift_c_total") == 1
    own.close()


def test_a_read_that_fails_is_logged_and_the_heart_beats_on() -> None:
    pb_utils = PbUtils()
    logged: list[str] = []

    def fail() -> float:
        raise RuntimeError("gone")

    own = MetricsFlusher(pb_utils, "m", [Gauge("g", "help", fail)], logged.append, period_s=0.01)
    wait_for(lambda: len(logged) >= 3)
    own.close()
    assert set(logged) == {"metrics could not be exported: gone"}
    assert pb_utils.metric("shapeshift_heartbeat_total") >= 2


def test_what_is_urgent_does_not_wait_for_the_next_flush() -> None:
    pb_utils = PbUtils()
    gauges = Gauges("stalled", "help", "thread", lambda: {"decode": 6.0}, urgent=lambda: True)
    # The first look is after 1 s, the first flush that is due, with a heartbeat, after 4 s.
    own = flusher(pb_utils, gauges, period_s=4.0)
    wait_for(lambda: pb_utils.metrics)
    assert pb_utils.metric("shapeshift_heartbeat_total") == 0
    own.close()


def test_a_server_without_metrics() -> None:
    logged: list[str] = []
    own = MetricsFlusher(PbUtils(with_metrics=False), "m", [Counter("c_total", "help")], logged.append, 0.01)
    own.close()
    assert logged == ["this server exports no metrics of backends"]


def test_close_lets_go_of_every_metric() -> None:
    pb_utils = PbUtils()
    counter = Counter("c_total", "help")
    own = flusher(pb_utils, counter, period_s=0.01)
    counter.add()
    wait_for(lambda: bool(own._exported))
    metric = weakref.ref(list(own._exported.values())[0][0])
    own.close()
    gc.collect()
    assert metric() is None


def test_gauges_with_labels_are_series_of_one_family() -> None:
    pb_utils = PbUtils()
    held = {"w0": 3.0, "w1": 5.0}
    gauges = [Gauge("held", "help", partial(held.__getitem__, own), {"worker": own}) for own in held]
    own = flusher(pb_utils, *gauges, Gauge("plain", "help", lambda: 1))
    own.flush()
    pid = str(os.getpid())
    assert pb_utils.metric("shapeshift_held", worker="w0", model="m", pid=pid) == 3
    assert pb_utils.metric("shapeshift_held", worker="w1", model="m", pid=pid) == 5
    held.update(w0=0.0, w1=7.0)
    own.flush()
    assert [pb_utils.metric("shapeshift_held", worker=name) for name in held] == [0, 7]
    assert [labels for (name, labels), _ in series(pb_utils) if name == "shapeshift_plain"] == [
        frozenset({"model": "m", "pid": pid}.items())
    ]
    own.close()


def test_counters_by_label_are_capped() -> None:
    pb_utils = PbUtils()
    counters = Counters("named_total", "help", "letter", most=2)
    own = flusher(pb_utils, counters)
    for name in ("a", "b", "c", "a", "d"):
        counters.add(name)
        own.flush()
    found = {name: pb_utils.metric("shapeshift_named_total", letter=name) for name in ("a", "b", "other")}
    assert found == {"a": 2, "b": 1, "other": 2}
    own.close()


def test_an_info_is_one_series_whatever_it_says() -> None:
    pb_utils = PbUtils()
    says = ["a"]
    own = flusher(pb_utils, Info("x_info", "help", lambda: {"names": says[0]}))
    began = time.time()
    for names in ("a", "a", "a,b", "", "a"):
        says[0] = names
        own.flush()
        gc.collect()
        living = [dict(labels)["names"] for name, labels in pb_utils.MetricFamily.living if name == "shapeshift_x_info"]
        assert living == [names]
        assert pb_utils.metric("shapeshift_x_info", names=names) >= began
    own.close()
