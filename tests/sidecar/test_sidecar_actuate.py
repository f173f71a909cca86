"""Applying actions to a fake server."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from shapeshift.errors import EngineError
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.health import DeadModel, ReloadBackoff
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.policy.moves import Action
from shapeshift.sidecar.run_files import OwedLoads
from tests import waiting
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer
from tests.sidecar.fleet import single
from tests.sidecar.stubs import Stubs


class Case:
    """A fake server with three workers loaded, an actuator, and its log."""

    def __init__(self, repositories: tuple[Path, ...] = ()) -> None:
        self.server = FakeServer()
        self.server.add_front()
        self.log: list[str] = []
        self.blocked = ""
        journal = Journal(logger(self.log), lambda values: None, {})
        self.actuator = Actuator(single(self.server).control, repositories, journal, lambda: self.blocked)
        loads = [Action("load", f"enc_w{number:02d}", bin_) for number, bin_ in enumerate((32, 128, 512))]
        assert self.actuator.apply([loads]).failed == ""
        self.server.calls.clear()


@pytest.fixture
def case() -> Case:
    return Case()


def test_batches_are_applied_in_order(case: Case) -> None:
    assert case.server.bins() == {"enc_w00": "32", "enc_w01": "128", "enc_w02": "512"}
    batches = [
        [Action("change", "enc_w00", 512, 32)],
        [Action("change", "enc_w01", 32, 128)],
        [Action("unload", "enc_w02", before=512)],
    ]
    outcome = case.actuator.apply(batches)
    assert outcome.failed == ""
    assert list(outcome.done) == [batch[0] for batch in batches]
    assert case.server.calls == [("load", "enc_w00", "512"), ("load", "enc_w01", "32"), ("unload", "enc_w02", "")]
    assert case.server.bins() == {"enc_w00": "512", "enc_w01": "32"}
    assert case.server.parameter("enc_w00", "generation") == "0"


def test_a_load_that_fails_keeps_the_last_good_plan(case: Case) -> None:
    case.server.fails = lambda name, bin_: "no such engine" if (name, bin_) == ("enc_w01", "32") else None
    before = case.server.bins()
    batches = [
        [Action("change", "enc_w00", 512, 32)],
        [Action("change", "enc_w01", 32, 128)],
        [Action("unload", "enc_w02", before=512)],
    ]
    outcome = case.actuator.apply(batches)
    assert outcome.done == ()
    assert "no such engine" in outcome.failed
    assert case.server.bins() == before
    assert any("enc_w01 128 -> 32: no such engine" in line for line in case.log)
    assert case.actuator.backoff.wait_s("enc_w01", 0.0) > 0


def test_a_failed_rollback_is_reported(case: Case) -> None:
    case.server.fails = lambda name, bin_: "broken" if (name, bin_) in {("enc_w01", "32"), ("enc_w00", "32")} else None
    outcome = case.actuator.apply([[Action("change", "enc_w00", 512, 32)], [Action("change", "enc_w01", 32, 128)]])
    assert [action.worker for action in outcome.done] == ["enc_w00"]
    assert case.server.bins()["enc_w00"] == "512"


def test_keep_going_applies_the_rest_after_a_failure(case: Case) -> None:
    case.server.fails = lambda name, bin_: "broken" if name == "enc_w03" else None
    loads = [[Action("load", f"enc_w0{number}", 512)] for number in (3, 4)]
    outcome = case.actuator.apply(loads, keep_going=True)
    assert [action.worker for action in outcome.done] == ["enc_w04"]
    assert "enc_w03" in outcome.failed


def test_a_worker_without_a_folder(case: Case) -> None:
    outcome = case.actuator.apply([[Action("load", "enc_w77", 512)]])
    assert "failed to poll" in outcome.failed


def test_a_reload_raises_the_generation_each_time(case: Case) -> None:
    case.server.fails = lambda name, bin_: "not now"
    assert not case.actuator.reload("enc_w01", DeadModel("dead", True))
    case.actuator.backoff = ReloadBackoff()
    case.server.fails = lambda name, bin_: None
    assert case.actuator.reload("enc_w01", DeadModel("dead", True))
    # One above the failed attempt: the server ignores a load with the configuration that it got last.
    assert case.server.parameter("enc_w01", "generation") == "2"
    assert case.server.bins()["enc_w01"] == "128"


def test_a_reload_that_did_not_help_is_followed_by_a_backoff(case: Case) -> None:
    assert case.actuator.reload("enc_w01", DeadModel("dead", True))
    loads = len(case.server.calls)
    for _ in range(5):
        assert not case.actuator.reload("enc_w01", DeadModel("dead", True))
    assert len(case.server.calls) == loads
    assert sum("waiting before" in line for line in case.log) == 1


def test_a_front_is_reloaded_too(case: Case) -> None:
    assert case.actuator.reload("enc", DeadModel("dead", True))
    assert case.server.parameter("enc", "generation") == "1"
    assert case.server.parameter("enc", "slo_ms") == "300"


def test_a_worker_whose_process_ended_stays_loaded_meanwhile(case: Case) -> None:
    assert case.actuator.reload("enc_w01", DeadModel("dead", True, ended=True))
    assert case.server.calls == [("load", "enc_w01", "128")]


@pytest.mark.parametrize(("model", "calls"), [("enc", ["unload", "load"]), ("enc_w01", ["load"])])
def test_a_suspended_process_is_killed_before_it_is_replaced(
    case: Case, stubs: Stubs, model: str, calls: list[str]
) -> None:
    process = stubs.start(f"{model}_0_0")
    process.send_signal(signal.SIGSTOP)
    # A process of another program with the pid of one that has ended is left alone.
    assert case.actuator.reload(model, DeadModel("suspended", True, suspended=(process.pid, os.getpid()), ended=True))
    assert process.wait() == -signal.SIGKILL
    assert [call[0] for call in case.server.calls] == calls
    killed = next(
        number for number, line in enumerate(case.log) if f"killed the suspended process {process.pid}" in line
    )
    assert killed < next(number for number, line in enumerate(case.log) if "loaded in" in line)


def test_nothing_is_killed_while_no_change_is_allowed(case: Case, stubs: Stubs) -> None:
    process = stubs.start("enc_0_0")
    case.blocked = "frozen"
    assert not case.actuator.reload("enc", DeadModel("suspended", True, suspended=(process.pid,), ended=True))
    assert process.poll() is None and case.server.calls == []


def test_the_next_sidecar_loads_what_this_one_has_unloaded(case: Case, tmp_path: Path) -> None:
    case.actuator.owed = OwedLoads(tmp_path / "owed")
    case.server.fails = lambda name, bin_: "no memory"
    assert not case.actuator.reload("enc", DeadModel("dead", True, ended=True))
    found = OwedLoads(tmp_path / "owed")
    assert found.names() == {"enc"}
    case.actuator.owed = found
    case.actuator.backoff = ReloadBackoff()
    case.server.fails = lambda name, bin_: None
    assert case.actuator.reload("enc", DeadModel("owed", True))
    assert OwedLoads(tmp_path / "owed").names() == frozenset()
    assert case.server.parameter("enc", "slo_ms") == "300"


def test_a_front_is_not_unloaded_where_that_cannot_be_remembered(case: Case, tmp_path: Path) -> None:
    case.actuator.owed = OwedLoads(tmp_path / "no folder" / "owed")
    assert case.actuator.reload("enc", DeadModel("dead", True, ended=True))
    assert case.server.calls == [("load", "enc", "")]
    assert case.actuator.owed.names() == frozenset()


@pytest.mark.parametrize("text", ["", "[1]", '{"enc": 3}', "{"])
def test_a_damaged_file_owes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "owed").write_text(text)
    assert OwedLoads(tmp_path / "owed").names() == frozenset()


@pytest.mark.parametrize("blocked", ["frozen", "dry run"])
def test_no_change_while_blocked(case: Case, blocked: str) -> None:
    case.blocked = blocked
    before = case.server.bins()
    assert not case.actuator.reload("enc_w01", DeadModel("dead", True))
    assert case.actuator.apply([[Action("unload", "enc_w01", before=128)]]).failed.endswith(blocked)
    assert (case.server.bins(), case.server.calls) == (before, [])
    assert any(f"dead: would be reloaded ({blocked})" in line for line in case.log)


def test_a_freeze_stops_a_plan_half_way(case: Case) -> None:
    def freeze_after(name: str, bin_: str) -> None:
        case.blocked = "frozen"

    case.server.fails = freeze_after
    outcome = case.actuator.apply([[Action("change", "enc_w00", 512, 32)], [Action("change", "enc_w01", 32, 128)]])
    assert [action.worker for action in outcome.done] == ["enc_w00"]
    assert case.server.bins() == {"enc_w00": "512", "enc_w01": "128", "enc_w02": "512"}


def test_only_one_thread_at_a_time_changes_a_model(case: Case) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(name: str, bin_: str) -> None:
        begun.set()
        assert go_on.wait(120)

    case.server.fails = slowly
    healing = threading.Thread(target=case.actuator.reload, args=("enc_w00", DeadModel("dead", True)))
    healing.start()
    assert begun.wait(120)
    case.server.fails = lambda name, bin_: None
    case.actuator.take_changed()
    assert case.actuator.take_changed() == case.actuator.changing == {"enc_w00"}
    assert not case.actuator.reload("enc_w00", DeadModel("dead", True))
    assert "another load" in case.actuator.apply([[Action("change", "enc_w00", 512, 32)]]).failed
    assert case.actuator.apply([[Action("change", "enc_w01", 512, 128)]]).failed == ""
    go_on.set()
    healing.join(20)
    assert case.actuator.changing == frozenset()
    # A load that starts and ends between two calls counts, too.
    assert case.actuator.take_changed() == {"enc_w00", "enc_w01"}
    assert case.actuator.take_changed() == frozenset()
    assert case.server.calls.count(("load", "enc_w00", "32")) == 1


def test_configurations_are_read_from_folders_if_possible(tmp_path: Path) -> None:
    (tmp_path / "enc_w03").mkdir()
    (tmp_path / "enc_w03" / "config.pbtxt").write_text(
        'name: "enc_w03" parameters { key: "bin" value { string_value: "512" } }'
        ' parameters { key: "engines" value { string_value: "../x" } }'
    )
    case = Case((tmp_path / "absent", tmp_path))
    assert case.actuator.apply([[Action("load", "enc_w03", 32), Action("load", "enc_w04", 128)]]).failed == ""
    # One load if the folder is readable here, two if only the server can read it.
    assert sorted(case.server.calls) == [
        ("load", "enc_w03", "32"),
        ("load", "enc_w04", "128"),
        ("load", "enc_w04", "512"),
    ]
    assert case.server.parameter("enc_w03", "engines") == "../x"


def test_server_errors_become_one_line(case: Case) -> None:
    def fail(name: str, bin_: str) -> None:
        raise EngineError("first line\n\nAt:\n  second line")

    case.server.fails = fail
    assert case.actuator.apply([[Action("change", "enc_w00", 512, 32)]]).failed.endswith("first line At: second line")


def test_an_interruption_does_not_wait_for_a_load_that_runs(case: Case) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(name: str, bin_: str) -> None:
        if name == "enc_w03":
            begun.set()
            assert go_on.wait(120)

    case.server.fails = slowly
    batches = [[Action("load", "enc_w03", 32), Action("change", "enc_w00", 512, 32)], [Action("load", "enc_w04", 32)]]
    outcome = case.actuator.apply(batches, interrupted=begun.is_set)
    assert "a node is gone" in outcome.failed
    assert Action("load", "enc_w03", 32) in outcome.begun
    assert case.actuator.changing >= {"enc_w03"} and "enc_w03" not in case.server.bins()
    assert "another load" in case.actuator.apply([[Action("load", "enc_w03", 512)]]).failed
    go_on.set()
    waiting.wait_for(lambda: not case.actuator.changing)
    assert case.server.bins()["enc_w03"] == "32" and "enc_w04" not in case.server.bins()
