"""Cleaning up plain processes, without a server."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from shapeshift.triton.embedded import guard, processes, run_record
from shapeshift.triton.embedded.run_record import Identity, Member, Record
from shapeshift.triton.embedded.server import clean_up, exclusive_use
from tests.waiting import wait_for

SHARED_MEMORY = Path("/dev/shm")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ignores SIGTERM, in its own session."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def record_of(process: subprocess.Popen[bytes]) -> Record:
    gone = Identity(process.pid, 1)
    return Record(
        owner=processes.identify(os.getpid()),
        guard=gone,
        server=processes.identify(process.pid),
        prefix=run_record.new_prefix(),
        boot=run_record.boot_id(),
    )


# Sets its own name, as any user of the machine may, and waits.
NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]))
print(1, flush=True)
time.sleep(60)
"""


@pytest.fixture(params=[b"\xff\xfe", b"a) (b", b"a b) S 1 1", b"x\ny) Z\n", b"()"], ids=repr)
def named(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a name that no program has by itself."""
    command = [sys.executable, "-c", NAMED, request.param.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_of_any_name_is_read(named: subprocess.Popen[bytes], sleeper: subprocess.Popen[bytes]) -> None:
    seen = psutil.Process(named.pid)
    entry = processes.look_up(named.pid)
    assert entry is not None and (entry.parent, entry.session, entry.state) == (seen.ppid(), named.pid, "S")
    assert entry.identity.start == round((seen.create_time() - psutil.boot_time()) * os.sysconf("SC_CLK_TCK"))
    assert [member.pid for member in processes.members(record_of(sleeper))] == [sleeper.pid]


def test_a_guard_outlives_a_process_of_any_name(named: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    order = guard.LaunchOrder(
        command=["sleep", "60"],
        environment={},
        log=str(tmp_path / "log"),
        record=str(path),
        prefix=run_record.new_prefix(),
        owner=os.getpid(),
        grace_s=0.0,
        about={},
    )
    command = [sys.executable, "-m", guard.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(guard.encode(order))
        process.stdin.close()
        # The record has members once the guard has looked at all processes.
        wait_for(lambda: process.poll() is not None or ((run := run_record.read(path)) and run.members))
        assert process.poll() is None, process.stderr.read().decode()
        process.terminate()


def test_a_guard_goes_on_after_a_round_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = subprocess.Popen(["sleep", "60"])
    rounds = 0

    def fail(run: Record) -> Record:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            server.kill()
        raise ValueError("an entry of another program")

    monkeypatch.setattr(guard.processes, "refresh", fail)
    order = guard.LaunchOrder([], {}, "", str(tmp_path / "server.json"), "", os.getppid(), 0.0, {})
    assert guard.watch(record_of(server), order, server.pid)[1] == -signal.SIGKILL
    text = capsys.readouterr().err
    assert "1 in a row: ValueError('an entry of another program')" in text


def test_record_survives_writing(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    run = dataclasses.replace(
        record_of(sleeper), members=(Member(1, 2, "region"),), regions=("region",), about={"ports": {"http": 1}}
    )
    run_record.write(run, tmp_path / "server.json")
    assert run_record.read(tmp_path / "server.json") == run


@pytest.mark.parametrize(
    "change", [{"boot": "before"}, {"prefix": ""}, {"prefix": "triton_"}, {"regions": ["../etc"]}, {"server": 3}]
)
def test_an_invalid_record_is_ignored(
    change: dict[str, object], tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "server.json"
    run_record.write(record_of(sleeper), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert run_record.read(path) is None
    clean_up(path)
    assert sleeper.poll() is None
    assert not path.exists()


def test_stop_kills_a_process_that_ignores_sigterm(sleeper: subprocess.Popen[bytes]) -> None:
    start = time.monotonic()
    processes.stop(record_of(sleeper), grace_s=0.3)
    assert sleeper.wait(timeout=120) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - start < 30


def test_stop_reaches_a_stopped_process(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    processes.stop(record_of(sleeper), grace_s=0.1)
    assert sleeper.wait(timeout=120) == -signal.SIGKILL


def test_another_process_with_a_reused_pid_keeps_running(sleeper: subprocess.Popen[bytes]) -> None:
    run = record_of(sleeper)
    former = dataclasses.replace(run.server, start=run.server.start - 1)
    processes.stop(dataclasses.replace(run, server=former, members=(Member(former.pid, former.start),)), 0.2)
    assert sleeper.poll() is None


def test_only_own_regions_are_removed(sleeper: subprocess.Popen[bytes]) -> None:
    run = dataclasses.replace(record_of(sleeper), regions=("shapeshift-test-recorded",))
    own = SHARED_MEMORY / f"{run.prefix}1"
    recorded = SHARED_MEMORY / "shapeshift-test-recorded"
    other = SHARED_MEMORY / f"{run_record.new_prefix()}1"
    try:
        for region in (own, recorded, other):
            region.touch()
        processes.remove_regions(run)
        assert not own.exists()
        assert not recorded.exists()
        assert other.exists()
    finally:
        for region in (own, recorded, other):
            region.unlink(missing_ok=True)


def test_one_holder_of_a_run_directory(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    path = tmp_path / "server.json"
    with exclusive_use(tmp_path, path):
        run_record.write(record_of(sleeper), path)
        with pytest.raises(Exception, match=rf"process {os.getpid()}"), exclusive_use(tmp_path, path):
            pass
    with exclusive_use(tmp_path, path):
        assert sleeper.wait(timeout=120) == -signal.SIGKILL
        assert not path.exists()


def _has_state(pid: int, suspended: bool) -> bool:
    return processes.is_suspended(pid) == suspended


def test_a_suspension_ends_when_it_has_lasted(
    sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    suspension = guard.Suspension(sleeper.pid, allowed_s=1.0)
    suspension.end_if_due(0.0)
    sleeper.send_signal(signal.SIGSTOP)
    wait_for(lambda: processes.is_suspended(sleeper.pid))
    for now in (10.0, 10.9):
        suspension.end_if_due(now)
        assert processes.is_suspended(sleeper.pid)
    suspension.end_if_due(11.0)
    wait_for(lambda: not processes.is_suspended(sleeper.pid))
    assert "after 1 s it goes on" in capsys.readouterr().err


def test_a_process_that_went_on_by_itself_may_be_suspended_again(sleeper: subprocess.Popen[bytes]) -> None:
    suspension = guard.Suspension(sleeper.pid, allowed_s=1.0)
    for now, number in ((0.0, signal.SIGSTOP), (0.5, signal.SIGCONT), (1.5, signal.SIGSTOP), (2.0, signal.SIGSTOP)):
        sleeper.send_signal(number)
        wait_for(partial(_has_state, sleeper.pid, number == signal.SIGSTOP))
        suspension.end_if_due(now)
    assert processes.is_suspended(sleeper.pid)
