"""The ring of events: what is read is what was written, also while it is written, and nobody waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.serving import events
from shapeshift.serving.events import RECORD_BYTES, Event, Ring, RingReader


def numbers(read: list[Event]) -> list[int]:
    return [event.values["n"] for event in read]


def test_a_reader_gets_what_was_written(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "a.1.ring", records=8)
    before = time.monotonic()
    ring.write("pack", {"texts": [3, 4], "share": np.float32(0.5), "count": np.int64(7), "who": "é"})
    (event,) = RingReader(tmp_path / "a.1.ring").read()
    assert (event.kind, event.values) == ("pack", {"texts": [3, 4], "share": 0.5, "count": 7, "who": "é"})
    assert before - 0.001 <= event.at <= time.monotonic() + 0.001


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    ring, file = Ring(tmp_path / "a.1.ring", records=8), tmp_path / "a.1.ring"
    reader = RingReader(file)
    assert reader.read() == []
    for number in range(3):
        ring.write("x", {"n": number})
    assert numbers(reader.read()) == [0, 1, 2]
    ring.write("x", {"n": 3})
    assert numbers(reader.read()) == [3]
    assert reader.read() == []


def test_a_full_ring_loses_the_oldest_and_says_how_many(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "a.1.ring", records=8)
    reader = RingReader(tmp_path / "a.1.ring")
    for number in range(20):
        ring.write("x", {"n": number})
    assert numbers(reader.read()) == [*range(12, 20)]
    assert reader.lost == 12


def test_what_does_not_fit_a_record_is_left_out(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "a.1.ring", records=8)
    ring.write("x", {"text": "a" * RECORD_BYTES})
    ring.write("x", {"n": 1})
    assert numbers(RingReader(tmp_path / "a.1.ring").read()) == [1]


def test_a_long_list_is_recorded_as_its_length(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "a.1.ring", records=8)
    ring.write("x", {"texts": [100] * 95, "n": 1})
    (event,) = RingReader(tmp_path / "a.1.ring").read()
    assert event.values == {"texts": 95, "n": 1}


def test_rows_fill_records(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "a.1.ring", records=64)
    rows = [[f"adapter-{number}" + "é" * (number % 40), 1 << 30, number] for number in range(50)]
    ring.write_rows("rows", [["a" * RECORD_BYTES], *rows])
    read = RingReader(tmp_path / "a.1.ring").read()
    assert [row for event in read for row in event.values["rows"]] == rows
    assert len(read) < 40
    ring.write_rows("rows", [])
    assert len(RingReader(tmp_path / "a.1.ring").read()) == len(read)


def test_a_reader_sees_that_another_process_has_its_file(tmp_path: Path) -> None:
    file = tmp_path / "a.1.ring"
    Ring(file, records=8)
    reader = RingReader(file)
    assert not reader.is_replaced
    Ring(file, records=8).write("x", {"n": 1})
    assert reader.is_replaced and not RingReader(file).is_replaced
    file.unlink()
    assert not reader.is_replaced, "nothing is there to be read instead"


def test_another_file_is_no_ring(tmp_path: Path) -> None:
    (tmp_path / "a.ring").write_bytes(b"something else, of another version" * 9)
    with pytest.raises(ValueError, match="no ring"):
        RingReader(tmp_path / "a.ring")


def test_threads_write_while_one_reads(tmp_path: Path) -> None:
    """Whatever is read is whole: the values of a record belong together; the number of lost ones is right."""
    ring = Ring(tmp_path / "a.1.ring", records=64)
    reader, read, each, threads = RingReader(tmp_path / "a.1.ring"), [], 3000, 3
    done = threading.Event()

    def write(who: int) -> None:
        for number in range(each):
            ring.write("x", {"n": number, "who": who, "same": f"{who}-{number}" * 8})

    def follow() -> None:
        while not done.is_set():
            read.extend(reader.read())

    following = threading.Thread(target=follow)
    following.start()
    writing = [threading.Thread(target=write, args=(who,)) for who in range(threads)]
    for thread in writing:
        thread.start()
    for thread in writing:
        thread.join()
    done.set()
    following.join()
    read.extend(reader.read())
    assert all(event.values["same"] == f"{event.values['who']}-{event.values['n']}" * 8 for event in read)
    assert len(read) + reader.lost == each * threads
    for who in range(threads):
        written = numbers([event for event in read if event.values["who"] == who])
        assert written == sorted(set(written))


# The ring of a process.


def in_process(code: str, folder: Path | str) -> dict[str, Any]:
    environment = {**os.environ, events.VARIABLE: str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", f"from shapeshift.serving import events\nlog = print\n{code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return {"out": done.stdout, "err": done.stderr}


def test_a_process_has_a_ring_where_the_environment_names_a_folder(tmp_path: Path) -> None:
    in_process("events.open_ring('m.x', log); events.record('x', n=1)", tmp_path / "events")
    (file,) = (tmp_path / "events").iterdir()
    assert events.model_of(file) == "m.x"
    assert numbers(RingReader(file).read()) == [1]
    assert file.stat().st_mode & 0o077 == 0, "only its user reads it"
    assert not events.is_written(file), "that process has ended"


def test_a_new_process_removes_what_ended_ones_left(tmp_path: Path) -> None:
    in_process("events.open_ring('m', log)", tmp_path)
    in_process("events.open_ring('m.x', log)", tmp_path)
    left = {file.name for file in tmp_path.iterdir()}
    in_process("events.open_ring('m', log)", tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert len(names) == 2
    assert left & names == {name for name in left if name.startswith("m.x.")}


def test_what_has_no_room_leaves_nothing(tmp_path: Path) -> None:
    no_room = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    said = in_process(f"{no_room}; events.open_ring('m', log); events.record('x', n=1)", tmp_path)["out"]
    assert "nothing is recorded" in said and list(tmp_path.iterdir()) == []


def test_a_new_process_removes_what_others_did_not_finish(tmp_path: Path) -> None:
    ended = in_process("import os; print(os.getpid())", tmp_path)["out"].strip()
    (tmp_path / f"m.{ended}.new").write_bytes(b"")
    (tmp_path / f"m.{os.getpid()}.new").write_bytes(b"")
    in_process("events.open_ring('m', log); events.close_ring()", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [f"m.{os.getpid()}.new"], "another one is just making its ring"


def test_a_process_says_whether_it_records(tmp_path: Path) -> None:
    code = "was = events.is_recording(); events.open_ring('m', log); print(was, events.is_recording())"
    assert in_process(f"{code}; events.close_ring(); print(events.is_recording())", tmp_path)["out"] == (
        "False True\nFalse\n"
    )


def test_a_closed_ring_is_gone_and_nothing_fails(tmp_path: Path) -> None:
    in_process("events.open_ring('m', log); events.close_ring(); events.record('x', n=1)", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_recorded_and_nothing_fails(tmp_path: Path) -> None:
    assert in_process("events.open_ring('m', log); events.record('x', n=1); events.close_ring()", "")["out"] == ""
    (tmp_path / "file").write_text("")
    said = in_process("events.open_ring('m', log); events.record('x', n=1)", tmp_path / "file")["out"]
    assert "nothing is recorded" in said
