"""Files that several processes change and read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shapeshift import files
from shapeshift.token_adapt import task_registry


def test_a_second_holder_waits_and_says_so(tmp_path: Path) -> None:
    lock, waits = tmp_path / "new" / "lock", threading.Event()
    order = []

    def second() -> None:
        with files.exclusive(lock, waits.set):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with files.exclusive(lock):
            done = pool.submit(second)
            assert waits.wait(60)
            order.append("first")
        done.result(timeout=60)
    assert order == ["first", "second"]


def test_the_first_holder_waits_for_nobody_even_after_an_error(tmp_path: Path) -> None:
    def waits() -> None:
        raise AssertionError("nobody holds it")

    with pytest.raises(KeyError), files.exclusive(tmp_path / "lock", waits):
        raise KeyError
    with files.exclusive(tmp_path / "lock", waits):
        pass


def test_text_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.replace_text(path, "old")
    with path.open() as before:
        files.replace_text(path, "n\u00e9w")
        assert before.read() == "old"
    assert path.read_text(encoding="utf-8") == "n\u00e9w"
    assert list(tmp_path.iterdir()) == [path]


def test_tasks_that_are_added_at_once_are_all_kept(tmp_path: Path) -> None:
    names = [f"task{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: task_registry.add(tmp_path, task_registry.Entry(name, tmp_path / name, "0")), names))
    assert [entry.name for entry in task_registry.read(tmp_path)] == sorted(names)
