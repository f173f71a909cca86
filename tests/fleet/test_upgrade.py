"""A rolling upgrade on nodes in memory: what fails is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from shapeshift.errors import InvalidInputError, ShapeshiftError, TimedOutError
from shapeshift.fleet.supervision.node_process import NodeCommand
from shapeshift.fleet.supervision.ray_fleet import RayFleet
from shapeshift.fleet.supervision.upgrade import UpgradeSettings, requests, upgrade
from shapeshift.triton.metrics import Samples

OLD, NEW = Path("old"), Path("new")
NAMES = ["node-0", "node-1", "node-2", "node-3"]


def metrics_page(taken: float, died: float = 0.0, **answers: float) -> Samples:
    """As Triton shows it: what a front answers with an error is a success; so many requests found it dead."""
    model = ("model", "encode")
    kinds = {"CANCELED": 50.0, "BACKEND": died}
    return {
        ("nv_inference_request_success", frozenset({model})): taken,
        **{("nv_inference_request_failure", frozenset({model, ("reason", kind)})): kinds[kind] for kind in kinds},
        **{("shapeshift_requests_total", frozenset({model, ("code", code)})): answers[code] for code in answers},
    }


class Fleet:
    """Nodes that count requests. broken: does not start from NEW; failing: answers with errors there.

    interrupts: what happens, the first time, as a user presses Ctrl-C. stuck: does not end its requests a second time.
    """

    def __init__(self, broken: str = "", failing: str = "", interrupts: Sequence[str] = (), stuck: str = "") -> None:
        self.commands = {name: NodeCommand(name, Path("fleet.toml"), OLD) for name in NAMES}
        self.happened: list[str] = []
        self._broken, self._failing, self._interrupts, self._stuck = broken, failing, interrupts, stuck
        self.counts = {name: [0, 0] for name in NAMES}

    def present_command(self, name: str) -> NodeCommand:
        return self.commands[name]

    def drain(self, name: str, timeout_s: float, say: Callable[[str], None]) -> None:
        self._happens(f"drain {name}")
        if name == self._stuck and self.happened.count(f"drain {name}") == 2:
            raise TimedOutError(f"not stopped after {timeout_s:g} s: {name} ()")

    def start(self, command: NodeCommand, timeout_s: float, say: Callable[[str], None]) -> None:
        self._happens(f"{command.build} {command.name}")
        self.commands[command.name] = command
        if command.name == self._broken and command.build == NEW:
            raise ShapeshiftError(f"not ready after {timeout_s:g} s: {command.name} (a model is missing)")

    def _happens(self, event: str) -> None:
        self.happened.append(event)
        if event in self._interrupts and self.happened.count(event) == 1:
            raise KeyboardInterrupt

    def page(self, name: str) -> Samples:
        answered, failed = self.counts[name]
        return metrics_page(answered + failed, INTERNAL=failed, OK=answered)

    def serve(self, seconds: float) -> None:
        """Every node gets 100 requests."""
        self.happened.append(f"watch {seconds:g}")
        for name, counts in self.counts.items():
            failing = name == self._failing and self.commands[name].build == NEW
            counts[0] += 97 if failing else 100
            counts[1] += 3 if failing else 0


def run(fleet: Fleet, **settings: float) -> list[str]:
    said: list[str] = []
    commands = [replace(command, build=NEW) for command in fleet.commands.values()]
    upgrade(cast(RayFleet, fleet), commands, UpgradeSettings(**settings), said.append, fleet.serve)
    return said


def test_nodes_follow_one_another_after_the_canaries() -> None:
    fleet = Fleet()
    assert run(fleet, canary=0.5, watch_s=7)[-1] == "200 requests, 0 failed\n"
    assert fleet.happened == [
        *("drain node-0", "new node-0", "drain node-1", "new node-1", "watch 7"),
        *("drain node-2", "new node-2", "drain node-3", "new node-3"),
    ]


def test_canaries_that_fail_are_taken_back_and_no_other_node_is_touched() -> None:
    fleet = Fleet(failing="node-0")
    with pytest.raises(ShapeshiftError, match=r"taken back: 3.0% of the requests to node-0 failed; the limit is 1.0%"):
        run(fleet)
    assert fleet.happened[3:] == ["drain node-0", "old node-0"]
    assert {command.build for command in fleet.commands.values()} == {OLD}


def test_a_few_errors_are_allowed() -> None:
    fleet = Fleet(failing="node-0")
    run(fleet, max_errors=0.03)
    assert {command.build for command in fleet.commands.values()} == {NEW}


def test_a_node_that_does_not_start_takes_back_those_before_it() -> None:
    fleet = Fleet(broken="node-2")
    with pytest.raises(ShapeshiftError, match="taken back: not ready after .*a model is missing"):
        run(fleet)
    assert {command.build for command in fleet.commands.values()} == {OLD}
    assert [one for one in fleet.happened if one.startswith("old")] == ["old node-2", "old node-1", "old node-0"]


def test_a_node_that_cannot_go_back_is_named_and_the_others_go_back() -> None:
    fleet = Fleet(broken="node-2", stuck="node-1")
    with pytest.raises(
        ShapeshiftError, match=r"failed: not ready .*; not taken back: node-1 \(not stopped after 1800 s"
    ):
        run(fleet)
    assert {name for name, command in fleet.commands.items() if command.build == NEW} == {"node-1"}


def test_a_node_whose_drain_is_interrupted_is_served_as_before() -> None:
    fleet = Fleet(interrupts=["drain node-1"])
    with pytest.raises(ShapeshiftError, match="the upgrade was taken back: it was interrupted"):
        run(fleet, watch_s=0)
    assert fleet.happened[-4:] == ["drain node-1", "old node-1", "drain node-0", "old node-0"]


def test_a_second_interruption_names_what_is_left() -> None:
    fleet = Fleet(interrupts=["new node-2", "old node-1"])
    with pytest.raises(ShapeshiftError, match=r"not taken back: node-1 \(interrupted\), node-0 \(interrupted\)$"):
        run(fleet)
    assert {name for name, command in fleet.commands.items() if command.build == NEW} == {"node-0", "node-1"}


def test_no_request_is_no_error() -> None:
    fleet = Fleet()
    fleet.serve = lambda seconds: None  # type: ignore[method-assign]
    assert run(fleet)[-1] == "0 requests, 0 failed\n"
    assert requests({}) == (0, 0)


def test_what_fails_is_what_the_server_and_the_fronts_cannot_serve() -> None:
    page = metrics_page(100, 4, OK=80, INTERNAL=3, UNAVAILABLE=2, INVALID_ARG=10, NOT_FOUND=3, CANCELLED=2)
    assert requests(page) == (95, 9)
    worker = frozenset({("model", "encode_w03"), ("reason", "BACKEND")})
    assert requests({**page, ("nv_inference_request_failure", worker): 70}) == (95, 9), "another worker served them"


def test_canaries_that_were_started_again_are_taken_back() -> None:
    fleet = Fleet()
    fleet.serve(0)

    def crash(seconds: float) -> None:
        fleet.counts["node-0"] = [3, 0]

    fleet.serve = crash  # type: ignore[method-assign]
    with pytest.raises(ShapeshiftError, match="taken back: the server of node-0 was started again meanwhile"):
        run(fleet)
    assert {command.build for command in fleet.commands.values()} == {OLD}


@pytest.mark.parametrize(("name", "value"), [("canary", 0), ("canary", 2), ("watch_s", -1), ("max_errors", 1.1)])
def test_bad_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=name):
        UpgradeSettings(**{name: value})
