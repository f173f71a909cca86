"""Supervision of a node, with a program in place of `shapeshift serve` that answers as it does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.fleet import settings
from shapeshift.fleet.supervision.node_process import NodeCommand, NodeProcess, kept_here
from shapeshift.fleet.supervision.node_supervisor import READY, STARTING, STOPPED, NodeStatus, NodeSupervisor
from tests import waiting
from tests.fleet.stub_program import stub_program

pytestmark = pytest.mark.timeout(120)
wait_for = partial(waiting.wait_for, pause_s=0.02)


@pytest.fixture
def command(tmp_path: Path) -> NodeCommand:
    return NodeCommand("a", tmp_path / "fleet.toml", tmp_path / "build", python=stub_program(tmp_path))


@pytest.fixture
def supervise(command: NodeCommand) -> Iterator[Callable[..., NodeSupervisor]]:
    """A function that makes a supervisor of the node; at the end all are closed, and the node is killed."""

    def end(supervisor: NodeSupervisor) -> None:
        supervisor.close()
        if pid := supervisor.status().pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with contextlib.ExitStack() as stack:

        def make(continues: bool = True) -> NodeSupervisor:
            made = NodeSupervisor(command, continues, leave_s=0.3, period_s=0.05)
            stack.callback(end, made)
            return made

        yield make


def test_the_next_supervisor_adopts_the_node(supervise: Callable[[], NodeSupervisor], command: NodeCommand) -> None:
    first = supervise()
    wait_for(lambda: first.status().state == READY)
    first.close()
    node = NodeProcess(command).identity
    assert node is not None and os.getsid(node.pid) == node.pid
    second = supervise()
    wait_for(lambda: second.status().state == READY)
    assert second.status().pid == first.status().pid == node.pid
    assert (first.status().starts, second.status().starts) == (1, 0)


def test_a_node_that_ends_is_started_again(supervise: Callable[[], NodeSupervisor]) -> None:
    found = supervise()
    wait_for(lambda: found.status().state == READY)
    before = found.status().pid
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: found.status().state == READY and found.status().pid != before)
    assert found.status().starts == 2


def test_a_drained_node_leaves_before_it_stops_and_can_be_started_again(
    supervise: Callable[[], NodeSupervisor], command: NodeCommand
) -> None:
    found = supervise()
    wait_for(lambda: found.status().state == READY)
    found.drain()
    states: list[NodeStatus] = []

    def has_stopped() -> bool:
        states.append(found.status())
        return states[-1].state == STOPPED

    wait_for(has_stopped)
    seen = list(dict.fromkeys(one.state for one in states))
    assert seen[-3:] == ["leaving", "stopping", "stopped"]
    assert not any(one.is_member for one in states if one.state != READY)
    found.start()
    wait_for(lambda: found.status().state == READY)


def test_the_next_supervisor_goes_on_with_a_drain(
    supervise: Callable[..., NodeSupervisor], command: NodeCommand
) -> None:
    first = supervise()
    wait_for(lambda: first.status().state == READY)
    first.drain()
    first.close()
    assert NodeProcess(command).identity is not None
    second = supervise()
    wait_for(lambda: second.status().state == STOPPED)
    assert second.status().is_drained and second.status().starts == 0
    second.close()
    third = supervise()
    wait_for(lambda: third.status().state == STOPPED)
    assert third.status().starts == 0
    third.close()
    fourth = supervise(continues=False)
    wait_for(lambda: fourth.status().state == STOPPED)
    fourth.start()
    wait_for(lambda: fourth.status().state == READY)
    fourth.close()
    assert not supervise().status().is_drained


def test_the_next_supervisor_serves_what_an_upgrade_has_left(
    supervise: Callable[..., NodeSupervisor], command: NodeCommand, tmp_path: Path
) -> None:
    first = supervise()
    wait_for(lambda: first.status().state == READY)
    first.drain()
    wait_for(lambda: first.status().state == STOPPED)
    newer = replace(command, build=tmp_path / "newer")
    first.start(newer)
    wait_for(lambda: first.status().state == READY)
    first.close()
    before = NodeProcess(newer).identity
    # With the command that the first supervisor was started with, which is older.
    second = supervise()
    wait_for(lambda: second.status().state == READY)
    assert NodeProcess(newer).identity == before and before is not None
    assert second.status().build == str(newer.build) and NodeProcess(command).identity is None
    os.kill(before.pid, signal.SIGKILL)
    wait_for(lambda: second.status().state == READY and second.status().pid != before.pid)
    assert second.status().build == str(newer.build)


def test_a_node_that_is_forgotten_leaves_nothing(
    supervise: Callable[..., NodeSupervisor], command: NodeCommand
) -> None:
    found = supervise()
    wait_for(lambda: found.status().state == READY)
    found.drain()
    wait_for(lambda: found.status().state == STOPPED)
    found.forget()
    found.close()
    again = supervise()
    wait_for(lambda: again.status().state == READY)


def test_what_is_kept_on_a_machine_is_what_runs_there_or_was_drained(
    supervise: Callable[..., NodeSupervisor], command: NodeCommand
) -> None:
    text = 'name = "demo"\n[[nodes]]\nname = "a"\ngrpc = "10.0.0.1:1"\nmetrics = "http://10.0.0.1:2/metrics"\n'
    command.file.write_text(text)

    def kept(host: str = "10.0.0.1") -> list[str]:
        return kept_here([("a", command.file), ("b", command.file.parent / "b" / "fleet.toml")], host)

    assert kept() == []
    found = supervise()
    wait_for(lambda: found.status().state == READY)
    assert kept() == ["a"] and kept("10.0.0.2") == [], "another machine with the same folder"
    found.drain()
    wait_for(lambda: found.status().state == STOPPED)
    assert kept() == ["a"]
    command.file.with_name("node.json").write_text("{")
    assert kept() == []


def test_a_node_that_is_still_stopping_is_not_started(
    supervise: Callable[[], NodeSupervisor], command: NodeCommand
) -> None:
    found = supervise()
    wait_for(lambda: found.status().state == READY)
    found.drain()
    with pytest.raises(ShapeshiftError, match="node a is still stopping"):
        found.start(command)
    wait_for(lambda: found.status().state == STOPPED)


def test_a_node_that_does_not_start_says_why_and_is_tried_again(
    supervise: Callable[[], NodeSupervisor], command: NodeCommand
) -> None:
    broken = command.run_directory / "broken"
    broken.parent.mkdir(parents=True)
    broken.touch()
    found = supervise()
    wait_for(lambda: found.status().problem == "a model is missing" and found.status().starts > 1)
    assert found.status().state == STARTING
    broken.unlink()
    wait_for(lambda: found.status().state == READY)


def test_a_new_command_takes_the_place_of_the_last_one(
    supervise: Callable[[], NodeSupervisor], command: NodeCommand, tmp_path: Path
) -> None:
    found = supervise()
    wait_for(lambda: found.status().state == READY)
    found.drain()
    wait_for(lambda: found.status().state == STOPPED)
    newer = replace(command, build=tmp_path / "newer")
    found.start(newer)
    try:
        wait_for(lambda: found.status().state == READY)
        assert found.status().build == str(newer.build)
    finally:
        found.close()
        NodeProcess(newer).kill()


def test_a_program_that_is_missing_is_named(command: NodeCommand) -> None:
    with pytest.raises(
        ShapeshiftError, match="node a cannot be started: .*No such file or directory: '/no/such/python'"
    ):
        NodeProcess(replace(command, python="/no/such/python")).start()


def test_the_fleet_file_is_written_only_where_it_changes(
    supervise: Callable[[], NodeSupervisor], command: NodeCommand
) -> None:
    found = supervise()
    text = 'name = "demo"\n[[nodes]]\nname = "a"\ngrpc = "127.0.0.1:1"\nmetrics = "http://127.0.0.1:2/metrics"\n'
    found.write_fleet_file(text)
    before = command.file.stat().st_ino
    found.write_fleet_file(text)
    assert command.file.stat().st_ino == before
    assert settings.read(command.file).nodes[0].name == "a"
