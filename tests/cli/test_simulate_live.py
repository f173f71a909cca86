"""The live page of a simulation: what it shows is what the simulated front did."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from shapeshift.cli.planning.live_source import SimulatedSource, WatchedRun
from shapeshift.live import encode, sidecar
from shapeshift.live.app import dead_models, drawn, state_of
from shapeshift.live.source import View
from shapeshift.simulate import scenario
from shapeshift.simulate.systems import TextSystem
from tests.simulate.scenarios import PROFILE, TEXTS
from tests.waiting import wait_for


@pytest.fixture
def case(tmp_path: Path) -> scenario.Scenario:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    (tmp_path / "scenario.toml").write_text(TEXTS)
    return scenario.read(tmp_path / "scenario.toml")


def text_system(case: scenario.Scenario) -> TextSystem:
    system = next(iter(case.systems.values()))
    assert isinstance(system, TextSystem)
    return system


def test_the_page_counts_what_the_simulated_front_did(case: scenario.Scenario) -> None:
    trace, system = case.load.draw(case.seed), text_system(case)
    watched, views = WatchedRun(system.planner(trace), trace), list[View]()
    watched.planner.events.every(1.0, lambda: views.append(watched.view()))
    served = watched.planner.run()
    last = watched.view()

    assert len(views) >= 19
    assert last.page.total("front", "request_tokens_count") == len(trace)
    assert last.page.total("front", "worker_rows_total") == (served.outcome == 0).sum()
    took = served.latency_ms[(trace.at_s > 8.0) & (trace.at_s < 18.0)]
    shown = views[17].change.quantile("front", "request_latency_ms", 0.98)
    assert shown is not None and 0.3 < shown / float(sorted(took)[int(len(took) * 0.98)]) < 3.0
    lengths = [length for packs in last.events.values() for pack in packs for length in pack.values["texts"]]
    assert sorted(lengths) == sorted(trace.length.tolist())
    assert [decision["text"] for decision in last.decisions] == [why for _, _, why in served.plans]
    assert not dead_models(views[0])
    for panel in (encode, sidecar):
        assert panel.models(views[5])
        html = drawn(panel.draw, views[5], panel.models(views[5])[0])
        assert "cannot be drawn" not in html
        assert min(watched.planner.bins) in html


def test_the_simulation_goes_on_at_the_pace_of_the_clock_until_it_is_stopped(
    case: scenario.Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shapeshift.cli.planning.live_source.PERIOD_S", 0.01)
    source = SimulatedSource("texts.toml", text_system(case), case.load.draw(case.seed), speed=200.0)
    source.start()
    seen: list[float] = []
    while len(seen) < 15:
        if source.view is not None and source.view.now not in seen[-1:]:
            seen.append(source.view.now)
        time.sleep(0.001)
    source.stop()
    assert any(later < earlier for earlier, later in zip(seen, seen[1:], strict=False)), "it did not begin again"
    assert "serving" in state_of(source)
    assert not source._loop._thread.is_alive()


def test_a_load_that_ends_before_the_first_look_is_shown(case: scenario.Scenario) -> None:
    source = SimulatedSource("texts.toml", text_system(case), case.load.draw(case.seed).scaled(100.0))
    source.start()
    wait_for(lambda: source.view is not None)
    source.stop()
    assert not source._loop._thread.is_alive()
