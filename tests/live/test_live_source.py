"""The page's numbers are the server's own, and follow it when it goes and comes back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shapeshift.live.counters import Change, LivePages
from shapeshift.live.source import HISTORY_S, RecentEvents, Source
from shapeshift.serving.events import Event
from shapeshift.triton import metrics
from tests.live.servers import MetricsServer, page, page_text, ring
from tests.waiting import wait_for


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer()
    yield server
    server.close()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FailingClock:
    fails = False

    def __call__(self) -> float:
        if self.fails:
            raise LookupError("no time")
        return time.monotonic()


def test_a_counter_grows_by_what_was_counted() -> None:
    old = page({"m requests_total code=OK": 5, "m requests_total code=INTERNAL": 1}, 0.0)
    new = page({"m requests_total code=OK": 25, "m requests_total code=INTERNAL": 1}, 10.0)
    change = Change(old, new)
    assert change.by("m", "requests_total", "code") == {"OK": 20.0, "INTERNAL": 0.0}
    assert (change.total("m", "requests_total"), change.rate("m", "requests_total")) == (20.0, 2.0)


def test_a_counter_that_fell_has_grown_from_0() -> None:
    change = Change(page({"m x_total": 50}, 0.0), page({"m x_total": 3}, 1.0))
    assert change.total("m", "x_total") == 3.0


def test_what_is_not_there_is_0() -> None:
    """A server of another version may lack a metric."""
    change = Change(page({}, 0.0), page({"m y": 1}, 1.0))
    assert (change.total("m", "x_total"), change.histogram("m", "x"), change.quantile("m", "x", 0.5)) == (0.0, {}, None)
    assert change.new.models_with("x_total") == []


def test_a_histogram_is_counted_by_bucket() -> None:
    old = page({"m x_bucket le=8": 1, "m x_bucket le=16": 1, "m x_bucket le=+Inf": 1}, 0.0)
    new = page({"m x_bucket le=8": 3, "m x_bucket le=16": 7, "m x_bucket le=+Inf": 8}, 1.0)
    change = Change(old, new)
    assert change.histogram("m", "x") == {8.0: 2.0, 16.0: 4.0, float("inf"): 1.0}
    assert change.quantile("m", "x", 0.5) == pytest.approx(8 + 8 * (3.5 - 2) / 4)


def test_what_an_ended_process_left_does_not_count() -> None:
    pages = LivePages()
    series = {"m heartbeat_total": 1.0, "m requests_waiting": 9.0}
    for second in range(5):
        last = pages.page(metrics.parse(page_text(series)), float(second))
    assert last.total("m", "requests_waiting") == 0.0
    assert pages.silent(4.0, -60.0) == ["m"] and pages.silent(4.0, 3.5) == [], "it ended longer ago"
    series["m heartbeat_total"] = 2.0
    assert pages.page(metrics.parse(page_text(series)), 6.0).total("m", "requests_waiting") == 9.0
    assert pages.silent(6.0, -60.0) == []


def test_a_process_that_goes_on_has_grown_since_it_stood_still() -> None:
    pages = LivePages()
    for second in range(5):
        still = pages.page(metrics.parse(page_text({"m heartbeat_total": 1.0, "m x_total": 100.0})), float(second))
    assert still.total("m", "x_total") == 0.0
    again = pages.page(metrics.parse(page_text({"m heartbeat_total": 2.0, "m x_total": 105.0})), 5.0)
    assert Change(still, again).total("m", "x_total") == 5.0


def test_the_view_is_that_of_the_server(server: MetricsServer, tmp_path: Path) -> None:
    clock = Clock()
    source = Source(lambda: server.addresses(tmp_path), clock=clock)
    for second in range(3):
        server.text = page_text({"m heartbeat_total": second, "m x_total": 10.0 * second})
        clock.now += 1.0
        source.look()
    assert source.problem == "" and source.view is not None
    assert source.view.page.total("m", "x_total") == 20.0
    assert source.view.change.rate("m", "x_total") == pytest.approx(10.0)


def test_a_server_that_is_gone_is_said_to_be_and_found_again(server: MetricsServer, tmp_path: Path) -> None:
    clock, servers = Clock(), [server]
    source = Source(lambda: servers[-1].addresses(tmp_path), clock=clock)
    server.text = page_text({"m heartbeat_total": 1.0})
    source.look()
    view = source.view
    server.close()
    clock.now += 1.0
    source.look()
    assert "no metrics" in source.problem
    assert source.view is view, "what was known stays"
    # It comes back at another port.
    again = MetricsServer()
    again.text = page_text({"m heartbeat_total": 1.0, "m x_total": 3.0})
    servers.append(again)
    clock.now += 1.0
    source.look()
    source.look()
    again.close()
    assert source.problem == "" and source.view is not view


def test_a_page_that_is_no_metrics_page_is_a_problem(server: MetricsServer, tmp_path: Path) -> None:
    source = Source(lambda: server.addresses(tmp_path), clock=Clock())
    server.text = "<html>another program</html>"
    source.look()
    assert "not in the Prometheus text format" in source.problem


def test_whatever_fails_is_said_and_the_page_goes_on(server: MetricsServer, tmp_path: Path) -> None:
    clock = FailingClock()
    source = Source(lambda: server.addresses(tmp_path), clock=clock)
    server.text = page_text({"m heartbeat_total": 1.0})
    source.start()
    wait_for(lambda: source.problem == "")
    clock.fails = True
    wait_for(lambda: "LookupError('no time')" in source.problem)
    clock.fails = False
    wait_for(lambda: source.problem == "")
    source.stop()


def test_calls_of_an_ended_process_stay_and_all_else_goes(server: MetricsServer, tmp_path: Path) -> None:
    source = Source(lambda: server.addresses(tmp_path))
    server.text = page_text({"m heartbeat_total": 1.0})
    first = ring(tmp_path, "m", os.getpid())
    first.write("pack", {"texts": [3]})
    first.write("join", {"slot": 0, "slots": [0]})
    source.look()
    assert source.view is not None
    assert [event.values["texts"] for event in source.view.recent("m", "pack", 60.0)] == [[3]]
    # The process is replaced.
    (tmp_path / "events" / f"m.{os.getpid()}.ring").unlink()
    ring(tmp_path, "m", 1).write("pack", {"texts": [4]})
    source.look()
    assert [event.values["texts"] for event in source.view.recent("m", "pack", 60.0)] == [[3], [4]], "a worker moved"
    assert source.view.recent("m", "join", 60.0) == [], "nobody holds its slots"
    assert source.view.now <= time.monotonic() < source.view.now + HISTORY_S


def test_a_kind_does_not_push_another_out(server: MetricsServer, tmp_path: Path) -> None:
    source = Source(lambda: server.addresses(tmp_path))
    server.text = page_text({"m heartbeat_total": 1.0})
    written = ring(tmp_path, "m", os.getpid())
    written.write("rare", {"n": 0})
    for _ in range(3):
        for number in range(3000):
            written.write("often", {"n": number})
        source.look()
    view = source.view
    assert view is not None
    assert len(view.recent("m", "rare", 60.0)) == 1
    assert 3000 <= len(view.recent("m", "often", 60.0)) < 9000


def test_who_holds_a_slot_is_known_however_long_that_is(tmp_path: Path) -> None:
    values = {"slot": 0, "slots": [0, 1]}
    recent = RecentEvents()
    recent.add([Event("join", 1.0, values), Event("first", 2.0, {"slot": 1}), Event("pack", 3.0, {})])
    recent.add([Event("join", 4.0, {"slot": 2, "slots": [2]}), Event("leave", 5.0, {"slot": 2})])
    recent.forget(100.0)
    assert [(event.kind, event.at) for event in recent.events()] == [("join", 1.0), ("first", 2.0)]
    recent.add([Event("leave", 101.0, {"slot": 1})])
    recent.forget(100.0)
    assert [event.kind for event in recent.events()] == ["leave"]


def test_a_later_process_of_the_same_number_is_read(server: MetricsServer, tmp_path: Path) -> None:
    source = Source(lambda: server.addresses(tmp_path))
    server.text = page_text({"m heartbeat_total": 1.0})
    for number in (1, 2):
        ring(tmp_path, "m", os.getpid()).write("x", {"n": number})
        source.look()
        assert source.view is not None
        assert [event.values["n"] for event in source.view.recent("m", "x", 60.0)] == [number]


def test_a_file_that_is_no_ring_is_left_alone(server: MetricsServer, tmp_path: Path) -> None:
    source = Source(lambda: server.addresses(tmp_path))
    server.text = page_text({"m heartbeat_total": 1.0})
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "m.1.ring").write_bytes(b"of another version" * 10)
    source.look()
    assert source.problem == "" and source.view is not None and source.view.events.get("m", []) == []
