"""Files that several processes read and write."""

from __future__ import annotations

import threading
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
            assert waits.wait(60)
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
