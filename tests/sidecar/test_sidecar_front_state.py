"""What the plan loop remembers of one front: nodes that go and come, the workers that are wanted, the periods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.policy.front_state import FrontState
from shapeshift.sidecar.workers import ServerModels
from tests.sidecar.fakes import front

TARGET = {"a/enc_w00": 32, "a/enc_w01": 64, "b/enc_w00": 32}


def on(*nodes: str, **changes: Any) -> Front:
    return replace(front(**changes), models=tuple(f"{node}/enc" for node in nodes))


def server(*nodes: str, pending: str = "") -> ServerModels:
    return ServerModels(nodes=frozenset(nodes), pending=frozenset(pending))


@pytest.fixture
def state() -> FrontState:
    return FrontState(dict(TARGET), nodes=frozenset("ab"), seen=frozenset("ab"))


def test_nothing_changes_while_all_nodes_answer(state: FrontState) -> None:
    state.follow(on("a", "b"), server("a", "b"))
    assert (state.target, state.replan, state.wanted(on("a", "b"))) == (TARGET, "", 0)


def test_a_node_that_is_late_or_whose_front_is_being_loaded_is_not_lost(state: FrontState) -> None:
    state.follow(on("a"), server("a", pending="b"))
    state.follow(on("a"), server("a", "b"))
    assert (state.target, state.replan, state.nodes) == (TARGET, "", frozenset("ab"))


def test_the_workers_of_a_lost_node_are_let_go_and_its_load_still_counts(state: FrontState) -> None:
    state.follow(on("a"), server("a"))
    assert state.target == {"a/enc_w00": 32, "a/enc_w01": 64}
    assert (state.replan, state.nodes) == ("node b is lost", frozenset("a"))
    assert state.models(on("a")) == ["a/enc", "b/enc"]


def test_every_change_is_named_in_order(state: FrontState) -> None:
    state.follow(on("c", "d"), server("c", "d"))
    assert state.replan == "node a is lost, node b is lost, node c has joined, node d has joined"
    assert (state.target, state.nodes, state.seen) == ({}, frozenset("cd"), frozenset("abcd"))


@pytest.mark.parametrize(
    ("workers", "scaled", "wanted"), [(2, False, 2), (5, False, 5), (1, False, 2), (5, True, 3), (1, True, 3)]
)
def test_after_a_change_as_many_workers_are_wanted_as_configured_or_as_before(
    state: FrontState, workers: int, scaled: bool, wanted: int
) -> None:
    """Two of three are left. Those whose number follows the latency had three."""
    limits = {"min_workers": 1, "max_workers": 9} if scaled else {"min_workers": workers}
    own = on("a", workers=workers, **limits)
    assert own.is_scaled is scaled
    state.follow(own, server("a"))
    assert state.wanted(own) == wanted


def page(at: float) -> MetricsPage:
    return MetricsPage({}, at)


@pytest.mark.parametrize(("now", "start"), [(104.9, 80.0), (105.0, 100.0), (130.0, 100.0)])
def test_what_arrived_is_counted_from_the_plan_before_where_the_last_is_recent(now: float, start: float) -> None:
    state = FrontState(plan_page=page(100.0), last_plan_page=page(80.0))
    found = state.period_start(now, 10.0)
    assert found is not None and found.at == start


def test_without_a_plan_before_the_last_one_counts() -> None:
    assert FrontState().period_start(100.0, 10.0) is None
    last = page(100.0)
    assert FrontState(plan_page=last).period_start(101.0, 10.0) is last
