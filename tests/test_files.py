"""Files that several processes read and write."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shapeshift import files
from shapeshift.token_adapt.tasks import registry


def test_second_process_waits_and_reports_it(tmp_path: Path) -> None:
    lock, waits = tmp_path / "new" / "lock", threading.Event()
    order = []

    def second() -> None:
        with files.exclusive_lock(lock, waits.set):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with files.exclusive_lock(lock):
            done = pool.submit(second)
            assert waits.wait(120)
            order.append("first")
        done.result(timeout=60)
    assert order == ["first", "second"]


def test_free_lock_does_not_wait_even_after_an_error(tmp_path: Path) -> None:
    def waits() -> None:
        raise AssertionError("nobody holds it")

    with pytest.raises(KeyError), files.exclusive_lock(tmp_path / "lock", waits):
        raise KeyError
    with files.exclusive_lock(tmp_path / "lock", waits):
        pass


def test_text_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.replace_text(path, "old")
    with path.open() as before:
        files.replace_text(path, "n\u00e9w")
        assert before.read() == "old"
    assert path.read_text(encoding="utf-8") == "n\u00e9w"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "replace",
    [files.replace_private, lambda path, content: files.replace_text(path, content.decode(), durable=False)],
    ids=["private", "text"],
)
def test_threads_that_write_one_file_do_not_disturb_each_other(
    tmp_path: Path, replace: Callable[[Path, bytes], None]
) -> None:
    texts = [f"{number}".encode() * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: replace(tmp_path / "file", text), texts * 10))
    assert (tmp_path / "file").read_bytes() in texts and [one.name for one in tmp_path.iterdir()] == ["file"]


def test_drafts_that_killed_processes_have_left_are_removed(tmp_path: Path) -> None:
    other = tmp_path / ".notes.draft"
    other.write_text("not ours")
    with files.draft_of(tmp_path / "old") as old, files.draft_of(tmp_path / "young") as young:
        old.mkdir()
        (old / "inner").write_text("x")
        young.write_text("x")
        for path in (old, other):
            os.utime(path, (1e9, 1e9))
        files.replace_text(tmp_path / "file", "text", durable=False)
        assert not old.exists() and young.exists()
        files.remove_drafts(tmp_path)
        assert sorted(tmp_path.iterdir()) == [other, tmp_path / "file"]


def test_after_an_error_files_are_what_they_were(tmp_path: Path) -> None:
    old, new, kept = tmp_path / "old", tmp_path / "new", tmp_path / "kept"
    old.write_text("1")
    with pytest.raises(KeyError), files.kept_on_error(old, new, kept):
        old.write_text("2")
        new.write_text("2")
        raise KeyError
    assert old.read_text() == "1" and list(tmp_path.iterdir()) == [old]
    with files.kept_on_error(old, new):
        old.write_text("2")
    assert old.read_text() == "2" and list(tmp_path.iterdir()) == [old]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What happens to which path, in order: writes to the disk and changes of names."""
    found: list[tuple[str, str]] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def record_fsync(descriptor: int) -> None:
        found.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        found.append(("replace", str(target)))
        replace(source, target)

    def record_rename(source: Path, target: Path) -> None:
        found.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    monkeypatch.setattr(os, "rename", record_rename)
    return found


def test_text_is_on_the_disk_before_it_has_its_name(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    path = tmp_path / "file"
    files.replace_text(path, "text")
    (_, draft), *others = calls
    assert others == [("replace", str(path)), ("fsync", str(tmp_path))]
    assert calls[0][0] == "fsync" and Path(draft).match(f"{tmp_path}/.file.*.draft")
    calls.clear()
    files.replace_text(path, "text", durable=False)
    assert calls == [("replace", str(path))]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    target, work = tmp_path / "engines", tmp_path / ".engines.building"
    with files.replace_folder(target) as draft:
        (draft / "inner").mkdir()
        (draft / "inner" / "file").write_text("text")
        (draft / "link").symlink_to("nowhere")
        calls.clear()
    last = [("fsync", str(work)), ("rename", str(target)), ("fsync", str(tmp_path))]
    assert calls[-3:] == last
    assert {path for _, path in calls[:-3]} == {str(work / "inner"), str(work / "inner" / "file")}


def test_a_disk_that_is_full_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.replace_text(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            files.replace_text(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_concurrently_added_tasks_are_all_kept(tmp_path: Path) -> None:
    names = [f"task{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: registry.add(tmp_path, registry.TaskEntry(name, tmp_path / name, "0")), names))
    assert [entry.name for entry in registry.read(tmp_path)] == sorted(names)


def test_folder_is_replaced_at_the_end_and_kept_after_an_error(tmp_path: Path) -> None:
    target = tmp_path / "engines"
    target.mkdir()
    (target / "old").touch()

    with pytest.raises(OSError, match="disk"), files.replace_folder(target) as work:
        (work / "new").touch()
        raise OSError("disk")
    assert [path.name for path in tmp_path.rglob("*")] == ["engines", "old"]

    with files.replace_folder(target) as work:
        (work / "new").touch()
        assert (target / "old").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["engines", "new"]


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o755, 0o644), (0o750, 0o640), (0o700, 0o600)])
def test_who_may_list_a_folder_may_read_its_files(tmp_path: Path, of_folder: int, of_file: int) -> None:
    (tmp_path / "checkpoint").touch(0o600)
    with files.replace_folder(tmp_path / "engines") as work:
        (work / "weights").touch(0o600)
        (work / "link").symlink_to(tmp_path / "checkpoint")
        work.chmod(of_folder)
    assert (tmp_path / "engines" / "weights").stat().st_mode & 0o777 == of_file
    assert (tmp_path / "checkpoint").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_removed_only_when_the_new_one_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    target, drafts, seen = tmp_path / "models" / "one", tmp_path / "drafts", []
    target.mkdir(parents=True)
    drafts.mkdir()
    (target / "old").touch()
    remove = shutil.rmtree

    def removed(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            seen.append(([file.name for file in target.iterdir()], [file.name for file in path.iterdir()]))
        remove(path, ignore_errors=ignore_errors)

    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    with files.replace_folder(target, within=drafts) as work:
        (work / "new").touch()
        assert [path.name for path in target.parent.iterdir()] == ["one"]
        monkeypatch.setattr(files.shutil, "rmtree", removed)
    assert seen == [(["new"], ["old"])]
    assert [*drafts.iterdir()] == [] and [path.name for path in target.parent.iterdir()] == ["one"]


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "key"
    files.replace_private(path, b"old")
    path.chmod(0o644)
    files.replace_private(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700 and [path] == list(path.parent.iterdir())


@pytest.mark.parametrize("ahead_s", [0.0, 300.0])
def test_a_young_file_is_not_remembered_whatever_this_machines_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    clock = time.time
    monkeypatch.setattr(files.time, "time", lambda: clock() + ahead_s)
    young, old, store = tmp_path / "young", tmp_path / "old", tmp_path / "hashes.json"
    for file in (young, old):
        file.write_bytes(b"one")
    os.utime(old, (1e9, 1e9))
    hashes = {file: files.RememberedHashes(store).sha256(file) for file in (young, old)}
    assert hashes[young] == hashes[old] == files.file_sha256(old)
    assert [*json.loads(store.read_text())] == [str(old.resolve())]
    store.write_text(store.read_text().replace(hashes[old], "remembered"))
    assert files.RememberedHashes(store).sha256(old) == "remembered"
