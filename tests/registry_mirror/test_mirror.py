"""The copy of a registry at a URL: what is fetched, checked, refused and deleted."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError
from shapeshift.registry import FILE, Registry
from shapeshift.registry_mirror.mirror import Mirror
from tests.registry_mirror.remote_registry import LAYOUT, TABLES, HeldBack, RemoteRegistry, let_a_minute_pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "build" / "registries" / "front"


@pytest.fixture
def mirror(remote: RemoteRegistry, folder: Path) -> Mirror:
    remote.put("one", "first", pinned=True)
    remote.put("two", "second")
    remote.publish()
    return Mirror("tasks_dir", remote.url, LAYOUT, folder)


def entries(folder: Path) -> dict[str, dict[str, Any]]:
    return Registry(folder, LAYOUT.kind).read().entries


def texts(folder: Path) -> dict[str, str]:
    """What the files of each entry hold."""
    return {name: (folder / entry["folder"] / "a").read_text() for name, entry in entries(folder).items()}


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".fetch")]


def test_a_copy_is_what_the_registry_is(mirror: Mirror, folder: Path) -> None:
    assert mirror.update() == {}
    assert texts(folder) == {"one": "first", "two": "second"}
    assert entries(folder)["one"]["pinned"] and left_over(folder) == []
    assert all(entry["folder"] == entry["sha256"] for entry in entries(folder).values())


def test_only_what_has_changed_is_fetched(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    mirror.update()
    before = (folder / FILE).stat()
    remote.fetched.clear()
    assert mirror.update() == {}
    assert remote.fetched == [FILE]
    after = (folder / FILE).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "nothing is written"
    remote.put("two", "changed")
    remote.publish()
    remote.fetched.clear()
    mirror.update()
    assert remote.fetched == [FILE, "two/a", "two/b"]
    assert texts(folder) == {"one": "first", "two": "changed"}


def test_a_new_process_trusts_hashes_and_not_names(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    mirror.update()
    (folder / entries(folder)["two"]["folder"] / "b").write_text("damaged")
    remote.fetched.clear()
    assert Mirror("tasks_dir", remote.url, LAYOUT, folder).update() == {}
    assert remote.fetched == [FILE, "two/a", "two/b"]
    assert (folder / entries(folder)["two"]["folder"] / "b").read_text() == "second"


@pytest.mark.parametrize("error", [PermissionError("403"), OSError(errno.EIO, "archived"), ConnectionError("reset")])
def test_an_object_that_cannot_be_read_costs_its_entry_alone(
    mirror: Mirror, folder: Path, remote: RemoteRegistry, error: Exception
) -> None:
    mirror.update()
    remote.put("one", "first again")
    remote.put("three", "third")
    remote.put("two", "second again")
    remote.publish()

    def refuse(path: str) -> None:
        if "/one/" in path:
            raise error

    HeldBack.before = staticmethod(refuse)
    (reason,) = mirror.update().values()
    assert reason.startswith(f"{remote.url}: one is not taken over: ") and type(error).__name__ in reason
    assert texts(folder) == {"one": "first", "two": "second again", "three": "third"}
    # It is asked for again, and not taken for damaged.
    HeldBack.before = staticmethod(lambda path: None)
    assert mirror.update() == {}
    assert texts(folder)["one"] == "first again" and left_over(folder) == []


def test_a_url_that_goes_away_is_not_asked_for_each_object(
    mirror: Mirror, folder: Path, remote: RemoteRegistry
) -> None:
    mirror.update()
    for name in ("one", "two", "three"):
        remote.put(name, "changed")
    remote.publish()
    asked: list[str] = []

    def end(path: str) -> None:
        asked.append(path)
        if len(asked) > 1:
            raise ConnectionError("refused")

    HeldBack.before = staticmethod(end)
    with pytest.raises(OverloadedError):
        mirror.update()
    assert len(asked) == 3 and texts(folder) == {"one": "first", "two": "second"}


def test_the_age_of_a_copy_is_that_of_its_last_look(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    assert mirror.age_s() is None, "there is no copy yet"
    mirror.update()
    hour_ago = time.time() - 3600
    os.utime(folder / ".read", (hour_ago, hour_ago))
    remote.break_off(ConnectionError("refused"))
    with pytest.raises(OverloadedError):
        mirror.update()
    age_s = mirror.age_s()
    assert age_s is not None and 3590 < age_s < 4600
    HeldBack.before = staticmethod(lambda path: None)
    mirror.update()
    age_s = mirror.age_s()
    assert age_s is not None and age_s < 1000, "a look that finds nothing new counts"


def test_a_copy_that_is_damaged_or_of_another_url_has_no_age(
    mirror: Mirror, folder: Path, remote: RemoteRegistry
) -> None:
    mirror.update()
    assert Mirror("tasks_dir", f"{remote.url}/other", LAYOUT, folder).age_s() is None
    damaged = folder / entries(folder)["two"]["folder"] / "b"
    damaged.write_text("damaged")
    assert mirror.age_s() is None
    damaged.write_text("second")
    assert mirror.age_s() is not None
    (folder / FILE).write_text("{")
    assert mirror.age_s() is None


def test_a_file_with_another_hash_changes_nothing(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    mirror.update()
    remote.put("one", "new")
    remote.put("two", "newer")
    remote.publish()
    remote.write("one/b", b"half")
    ((key, said),) = mirror.update().items()
    assert key == f"one {remote.entries['one']['sha256']}"
    assert said.startswith(f"{remote.url}: one is not taken over: sha256: got ") and "copy registry.json last" in said
    assert texts(folder) == {"one": "first", "two": "newer"}, "the other entries change"
    remote.fetched.clear()
    assert mirror.update() == {key: said} and remote.fetched == [FILE], "they are not fetched again at once"
    remote.write("one/b", b"new")
    assert Mirror("tasks_dir", remote.url, LAYOUT, folder, retry_s=0.0).update() == {}
    assert texts(folder)["one"] == "new"


def test_a_reader_never_sees_a_part(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    """While files come, the copy names the old ones, and no folder of an entry is incomplete."""
    mirror.update()
    seen: list[tuple[dict[str, str], list[int]]] = []

    def look(path: str) -> None:
        seen.append((texts(folder), [len(list(one.iterdir())) for one in folder.glob("[0-9a-f]*")]))

    HeldBack.before = staticmethod(look)
    remote.put("one", "new")
    remote.publish()
    mirror.update()
    assert seen == [({"one": "first", "two": "second"}, [2, 2])] * 3
    assert texts(folder)["one"] == "new"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"folder": "../../outside"}, "folder: got '../../outside'; the name of what lies beside registry.json"),
        ({"folder": "/etc"}, "folder: got '/etc'"),
        ({"folder": "s3://other/x"}, "folder: got 's3://other/x'"),
        ({"folder": ".."}, "folder: got '..'"),
        ({"folder": 1}, "folder: got 1"),
        ({"sha256": "../../x"}, "sha256: got '../../x'; 64 hexadecimal digits"),
    ],
)
def test_names_are_no_paths(
    mirror: Mirror, folder: Path, remote: RemoteRegistry, fields: dict[str, Any], said: str
) -> None:
    remote.entries["one"].update(fields)
    remote.publish()
    assert said in next(iter(mirror.update().values()))
    assert list(entries(folder)) == ["two"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_entry_that_no_server_would_accept_is_left_out(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    remote.put("unservable", "x")
    remote.publish()
    assert "unservable is not taken over: name: got" in next(iter(mirror.update().values()))
    assert sorted(entries(folder)) == ["one", "two"]


def test_a_missing_file_is_that_entrys_fault_alone(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    remote.delete("one/b")
    assert f"there is no {remote.url}/one/b" in next(iter(mirror.update().values()))
    assert list(entries(folder)) == ["two"]


def test_a_url_that_fails_changes_nothing(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    mirror.update()
    before = texts(folder)
    remote.put("three", "third")
    remote.publish()
    remote.break_off(ConnectionError("refused by https://user:secret@host/x?X-Amz-Signature=abc"))
    with pytest.raises(OverloadedError, match="cannot be read: ConnectionError: refused by https://host/x$") as caught:
        mirror.update()
    assert remote.url in str(caught.value) and "secret" not in str(caught.value)
    assert texts(folder) == before and left_over(folder) == []


@pytest.mark.parametrize("content", [b"{", b'{"format": 3, "entries": {}}', None])
def test_no_registry_changes_nothing(
    mirror: Mirror, folder: Path, remote: RemoteRegistry, content: bytes | None
) -> None:
    mirror.update()
    if content is None:
        remote.delete(FILE)
    else:
        remote.write(FILE, content)
    with pytest.raises((InvalidInputError, NotFoundError)):
        mirror.update()
    assert texts(folder) == {"one": "first", "two": "second"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_build_folder_changes_nothing(
    mirror: Mirror, folder: Path, remote: RemoteRegistry, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.update()

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    remote.put("one", "new")
    remote.publish()
    for name in ("tempfile.mkdtemp", "shapeshift.files.flush_folder", "shapeshift.files.replace_text"):
        with monkeypatch.context() as full:
            full.setattr(name, fails)
            with pytest.raises(OverloadedError, match=os.strerror(number)):
                mirror.update()
        assert texts(folder) == {"one": "first", "two": "second"} and left_over(folder) == []
    assert mirror.update() == {} and texts(folder)["one"] == "new"


def test_what_is_no_longer_wanted_installs_nothing(mirror: Mirror, folder: Path) -> None:
    mirror.update(lambda: False)
    assert entries(folder) == {}


def test_removed_files_stay_for_a_while(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    mirror.update()
    kept = folder / entries(folder)["one"]["folder"]
    one = remote.entries.pop("one")
    remote.publish()
    mirror.update()
    assert list(entries(folder)) == ["two"] and kept.is_dir()
    remote.entries["one"] = one
    remote.publish()
    let_a_minute_pass(folder, LAYOUT.kind)
    mirror.update()
    assert texts(folder)["one"] == "first", "what is added again stays"
    del remote.entries["one"]
    remote.publish()
    mirror.update()
    let_a_minute_pass(folder, LAYOUT.kind)
    mirror.update()
    assert not kept.exists() and texts(folder) == {"two": "second"}


def test_what_a_killed_process_left_is_deleted(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    mirror.update()
    (folder / ".fetch-old").mkdir()
    (folder / ".fetch-new").mkdir()
    os.utime(folder / ".fetch-old", (0, 0))
    mirror.update()
    assert left_over(folder) == [".fetch-new"]


def test_two_processes_keep_one_copy(mirror: Mirror, folder: Path, remote: RemoteRegistry) -> None:
    other = Mirror("tasks_dir", remote.url, LAYOUT, folder)

    put: dict[str, int] = {}

    def overtake(path: str) -> None:
        HeldBack.before = staticmethod(lambda path: None)
        other.update()
        put.update({one.name: one.stat().st_ino for one in folder.glob("[0-9a-f]*")})

    HeldBack.before = staticmethod(lambda path: overtake(path) if path.endswith("/b") else None)
    assert mirror.update() == {} and other.update() == {}
    assert texts(folder) == {"one": "first", "two": "second"}
    assert len(put) == 2 and {name: (folder / name).stat().st_ino for name in put} == put, "none is put there twice"


def test_entries_may_be_single_files(remote: RemoteRegistry, folder: Path) -> None:
    text = b'{"task": "coin"}'
    remote.write("coin.json", text)
    sha256 = hashlib.sha256(text).hexdigest()
    remote.entries["coin"] = {"table": "coin.json", "sha256": sha256, "candidate": "small"}
    remote.publish()
    tables = Mirror("candidates_dir", remote.url, TABLES, folder)
    assert tables.update() == {}
    assert entries(folder)["coin"] == {"table": f"{sha256}.json", "sha256": sha256, "candidate": "small"}
    assert (folder / f"{sha256}.json").read_bytes() == text
    remote.write("coin.json", text + b" ")
    (folder / f"{sha256}.json").write_text("damaged")
    assert "not taken over" in next(iter(tables.update().values()))
    assert json.loads((folder / FILE).read_text())["entries"]["coin"]["sha256"] == sha256
