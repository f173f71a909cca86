"""The files of the run directory, the journal, the process tracker and the settings."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shapeshift.cli.sidecar import SidecarProcess
from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.sidecar import run_files
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.embedded.process_tracker import ProcessState, ProcessTracker
from shapeshift.triton.settings import ServerSettings
from tests.fakes import logger

HOLD = (
    "import sys, time; from pathlib import Path; from shapeshift.sidecar import run_files\n"
    "with run_files.sole_sidecar(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def test_one_sidecar_at_a_time(tmp_path: Path) -> None:
    place = tmp_path / "run"
    assert run_files.lock_holder(place) is None
    with run_files.sole_sidecar(place):
        assert run_files.lock_holder(place) == os.getpid()
        with pytest.raises(ShapeshiftError, match=f"process {os.getpid()} is the sidecar of .*; stop it first"):
            run_files.sole_sidecar(place).__enter__()
    assert run_files.lock_holder(place) is None
    with run_files.sole_sidecar(place):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert run_files.lock_holder(tmp_path) == other.pid
    other.send_signal(signal.SIGKILL)
    other.communicate()
    with run_files.sole_sidecar(tmp_path):
        assert run_files.lock_holder(tmp_path) == os.getpid()


def test_a_report_settles_only_for_the_sidecar_that_runs(tmp_path: Path) -> None:
    child = SidecarProcess(ServerSettings(repositories=(tmp_path,), run_directory=tmp_path), 1.0)
    assert not child.has_settled()
    with run_files.sole_sidecar(tmp_path):
        for report, settled in (
            ({"settled": ["a", "b"], "pid": os.getpid()}, True),
            ({"settled": ["b"], "pid": os.getpid()}, False),
            ({"settled": ["a"], "pid": os.getpid() + 1}, False),
            ({"settled": None, "pid": os.getpid()}, False),
        ):
            run_files.write_report(tmp_path, report)
            assert child.has_settled(["a"]) is settled
    run_files.write_report(tmp_path, {"settled": [], "pid": os.getpid()})
    assert not child.has_settled(), "the report of a sidecar that has ended"


def test_the_freeze_switch_persists(tmp_path: Path) -> None:
    place = tmp_path / "run"
    assert not run_files.is_frozen(place)
    run_files.freeze(place)
    run_files.freeze(place)
    assert run_files.is_frozen(place)
    run_files.thaw(place)
    run_files.thaw(place)
    assert not run_files.is_frozen(place)
    with pytest.raises(ShapeshiftError, match="cannot write"):
        run_files.freeze(Path("/proc/nowhere"))


def test_a_report_is_complete_or_empty(tmp_path: Path) -> None:
    assert run_files.read_report(tmp_path) == {}
    run_files.write_report(tmp_path, {"pid": 5})
    assert run_files.read_report(tmp_path) == {"pid": 5}
    assert [path.name for path in tmp_path.iterdir()] == [run_files.REPORT_FILE]
    for damaged in ("{", "[1]", ""):
        (tmp_path / run_files.REPORT_FILE).write_text(damaged)
        assert run_files.read_report(tmp_path) == {}


def test_the_journal_logs_an_unchanged_state_once() -> None:
    lines: list[str] = []
    published: list[dict[str, object]] = []
    journal = Journal(logger(lines), published.append, {"pid": 1})
    for text in ("no answer", "no answer", "other", "other", "no answer"):
        journal.log_once("metrics", "server", text)
    journal.log_once("metrics", "elsewhere", "no answer")
    assert lines == [
        "metrics server: no answer",
        "metrics server: other",
        "metrics server: no answer",
        "metrics elsewhere: no answer",
    ]
    assert journal.clear("metrics", "server")
    assert not journal.clear("metrics", "server")
    journal.log_once("metrics", "server", "no answer")
    journal.log("change", "w", "done")
    journal.log("change", "w", "done")
    assert len(lines) == 7
    journal.record_plan("enc", {"reason": "so"})
    journal.update_status(settled=True)
    last = json.loads(json.dumps(published[-1]))
    assert (last["pid"], last["settled"], last["plans"]["enc"]["reason"]) == (1, True, "so")
    assert last["decisions"][-1]["text"] == "done"
    updates = len(published)
    journal.update_status(settled=True)
    assert len(published) == updates


def test_only_stubs_are_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here, elsewhere = ProcessTracker(local=True), ProcessTracker(local=False)
    # It is not the process of a model.
    assert here.state(child.pid) is ProcessState.ABSENT
    assert elsewhere.state(child.pid) is ProcessState.UNKNOWN
    child.communicate(b"\n")


def test_a_stub_is_identified_by_pid_and_start(tmp_path: Path) -> None:
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "60"])
    sight = ProcessTracker(local=False)
    deadline = time.monotonic() + 120
    while sight.state(child.pid) is ProcessState.UNKNOWN and time.monotonic() < deadline:
        time.sleep(0.01)
    sight.remember([child.pid])
    assert sight.state(child.pid) is ProcessState.ALIVE
    child.kill()
    assert child.wait() < 0
    assert sight.state(child.pid) is ProcessState.ENDED
    sight.keep_only([])
    assert sight.state(child.pid) is ProcessState.UNKNOWN


def test_workers_are_distinguished_from_models(tmp_path: Path) -> None:
    for name in ("enc", "enc_w00", "enc_w11", "enc_w1", "lone_w00", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").touch()
    (tmp_path / "empty").mkdir()
    assert run_files.repository_models([tmp_path, tmp_path / "absent"]) == (
        {"enc", "enc_w1", "lone_w00", "plain"},
        {"enc"},
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("plan_period_s", -1.0),
        ("plan_period_s", float("nan")),
    ],
)
def test_invalid_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        SidecarSettings(**{field: value})  # type: ignore[arg-type]


def test_only_the_journal_reads_the_wall_clock() -> None:
    """Decisions must not depend on the wall clock."""
    package = Path(run_files.__file__).parent
    found = {
        file.name
        for file in package.glob("*.py")
        if re.search(r"\btime\.time\(|datetime|\btime_ns\(", file.read_text())
    }
    assert found == {"journal.py"}
