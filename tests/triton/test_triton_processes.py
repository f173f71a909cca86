"""Cleaning up, tried on plain processes: no server is needed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shapeshift.triton import leftovers, processes, record
from shapeshift.triton.record import Identity, Member, Record

SHARED_MEMORY = Path("/dev/shm")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ignores SIGTERM, in a session of its own."""
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
        prefix=record.new_prefix(),
        boot=record.boot_id(),
    )


def test_record_survives_writing(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    run = dataclasses.replace(
        record_of(sleeper), members=(Member(1, 2, "region"),), regions=("region",), about={"ports": {"http": 1}}
    )
    record.write(run, tmp_path / "server.json")
    assert record.read(tmp_path / "server.json") == run


@pytest.mark.parametrize(
    "change", [{"boot": "before"}, {"prefix": ""}, {"prefix": "triton_"}, {"regions": ["../etc"]}, {"server": 3}]
)
def test_record_that_cannot_be_trusted_is_ignored(
    change: dict[str, object], tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "server.json"
    record.write(record_of(sleeper), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert record.read(path) is None
    leftovers.clean(path)
    assert sleeper.poll() is None
    assert not path.exists()


def test_stop_kills_what_will_not_end(sleeper: subprocess.Popen[bytes]) -> None:
    start = time.monotonic()
    processes.stop(record_of(sleeper), grace_s=0.3)
    assert sleeper.wait(timeout=30) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - start < 5


def test_stop_reaches_a_stopped_process(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.send_signal(signal.SIGSTOP)
    processes.stop(record_of(sleeper), grace_s=0.1)
    assert sleeper.wait(timeout=30) == -signal.SIGKILL


def test_a_number_that_passed_to_another_process_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    run = record_of(sleeper)
    former = dataclasses.replace(run.server, start=run.server.start - 1)
    processes.stop(dataclasses.replace(run, server=former, members=(Member(former.pid, former.start),)), 0.2)
    assert sleeper.poll() is None


def test_only_own_regions_are_removed(sleeper: subprocess.Popen[bytes]) -> None:
    run = dataclasses.replace(record_of(sleeper), regions=("shapeshift-test-recorded",))
    own = SHARED_MEMORY / f"{run.prefix}1"
    recorded = SHARED_MEMORY / "shapeshift-test-recorded"
    other = SHARED_MEMORY / f"{record.new_prefix()}1"
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
    with leftovers.sole_use(tmp_path, path):
        record.write(record_of(sleeper), path)
        with pytest.raises(Exception, match=rf"process {os.getpid()}"), leftovers.sole_use(tmp_path, path):
            pass
    with leftovers.sole_use(tmp_path, path):
        assert sleeper.wait(timeout=30) == -signal.SIGKILL
        assert not path.exists()
