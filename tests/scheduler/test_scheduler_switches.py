"""The lock, the freeze switch, the report and the journal."""

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

from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.scheduler import folders, freeze, lock, report
from shapeshift.scheduler.journal import Journal
from shapeshift.scheduler.settings import SchedulerSettings
from shapeshift.scheduler.sight import Fate, Sight

HOLD = (
    "import sys, time; from pathlib import Path; from shapeshift.scheduler import lock\n"
    "with lock.sole_writer(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    place = tmp_path / "run"
    assert lock.holder(place) is None
    with lock.sole_writer(place):
        assert lock.holder(place) == os.getpid()
        with pytest.raises(ShapeshiftError, match=f"process {os.getpid()} is the scheduler of .*; stop it first"):
            lock.sole_writer(place).__enter__()
    assert lock.holder(place) is None
    with lock.sole_writer(place):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert lock.holder(tmp_path) == other.pid
    other.send_signal(signal.SIGKILL)
    other.communicate()
    with lock.sole_writer(tmp_path):
        assert lock.holder(tmp_path) == os.getpid()


def test_the_freeze_switch_lasts(tmp_path: Path) -> None:
    place = tmp_path / "run"
    assert not freeze.is_frozen(place)
    freeze.freeze(place)
    freeze.freeze(place)
    assert freeze.is_frozen(place)
    freeze.thaw(place)
    freeze.thaw(place)
    assert not freeze.is_frozen(place)
    with pytest.raises(ShapeshiftError, match="cannot write"):
        freeze.freeze(Path("/proc/nowhere"))


def test_a_report_is_whole_or_absent(tmp_path: Path) -> None:
    assert report.read(tmp_path) == {}
    report.write(tmp_path, {"pid": 5})
    assert report.read(tmp_path) == {"pid": 5}
    assert [path.name for path in tmp_path.iterdir()] == [report.FILE]
    for damaged in ("{", "[1]", ""):
        (tmp_path / report.FILE).write_text(damaged)
        assert report.read(tmp_path) == {}


def test_the_journal_says_once_what_stays_the_same() -> None:
    said: list[str] = []
    published: list[dict[str, object]] = []
    journal = Journal(said.append, published.append, {"pid": 1})
    for text in ("no answer", "no answer", "other", "other", "no answer"):
        journal.say("metrics", "server", text)
    journal.say("metrics", "elsewhere", "no answer")
    assert [line.split(" ", 1)[1] for line in said] == [
        "metrics server: no answer\n",
        "metrics server: other\n",
        "metrics server: no answer\n",
        "metrics elsewhere: no answer\n",
    ]
    assert journal.forget("metrics", "server")
    assert not journal.forget("metrics", "server")
    journal.say("metrics", "server", "no answer")
    journal.event("change", "w", "done")
    journal.event("change", "w", "done")
    assert len(said) == 7
    journal.plan("enc", {"reason": "so"})
    journal.about(settled=True)
    last = json.loads(json.dumps(published[-1]))
    assert (last["pid"], last["settled"], last["plans"]["enc"]["reason"]) == (1, True, "so")
    assert last["decisions"][-1]["text"] == "done"
    updates = len(published)
    journal.about(settled=True)
    assert len(published) == updates


def test_a_process_that_can_be_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here, elsewhere = Sight(local=True), Sight(local=False)
    # It is no model's process, so its number says nothing.
    assert here.fate(child.pid) is Fate.ABSENT
    assert elsewhere.fate(child.pid) is Fate.UNSEEN
    child.communicate(b"\n")


def test_a_stub_is_known_by_number_and_start(tmp_path: Path) -> None:
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(program), "60"])
    sight = Sight(local=False)
    deadline = time.monotonic() + 20
    while sight.fate(child.pid) is Fate.UNSEEN and time.monotonic() < deadline:
        time.sleep(0.01)
    sight.meet([child.pid])
    assert sight.fate(child.pid) is Fate.ALIVE
    child.kill()
    assert child.wait() < 0
    assert sight.fate(child.pid) is Fate.ENDED
    sight.forget_all_but([])
    assert sight.fate(child.pid) is Fate.UNSEEN


def test_worker_folders_are_told_from_models(tmp_path: Path) -> None:
    for name in ("enc", "enc_w00", "enc_w11", "enc_w1", "lone_w00", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").touch()
    (tmp_path / "empty").mkdir()
    assert folders.models([tmp_path, tmp_path / "absent"]) == ({"enc", "enc_w1", "lone_w00", "plain"}, {"enc"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("health_period_s", 0.0),
        ("plan_period_s", -1.0),
        ("scale_period_s", float("nan")),
        ("load_timeout_s", 1e9),
        ("batch", -1),
        ("start_batch", 0),
        ("least_texts", 0),
        ("least_gain", 1.0),
        ("assumed_load", 0.0),
    ],
)
def test_settings_that_make_no_sense(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        SchedulerSettings(**{field: value})  # type: ignore[arg-type]


def test_batches_grow_with_the_fleet() -> None:
    assert [SchedulerSettings().batch_of(workers) for workers in (1, 8, 40)] == [1, 1, 5]
    assert SchedulerSettings(batch=3).batch_of(1) == 3


def test_only_the_journal_looks_at_the_time_of_day() -> None:
    """A clock that is set must not matter."""
    package = Path(folders.__file__).parent
    found = {
        file.name
        for file in package.glob("*.py")
        if re.search(r"\btime\.time\(|datetime|\btime_ns\(", file.read_text())
    }
    assert found == {"journal.py"}
