"""The threads that keep a copy of a registry up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.registry import Follower, Registry, follow
from shapeshift.registry_mirror.follower import RegistryFollower
from shapeshift.registry_mirror.mirror import Mirror
from tests.registry_mirror.remote_registry import LAYOUT, RemoteRegistry
from tests.waiting import wait_for

Start = Callable[..., RegistryFollower]


class Script:
    """A mirror whose updates end as a test says."""

    def __init__(self) -> None:
        self.outcome: dict[str, str] | Exception = {}
        self.held = threading.Event()
        self.held.set()
        self.started = 0
        self.wanted: list[bool] = []

    def update(self, is_wanted: Callable[[], bool]) -> dict[str, str]:
        self.started += 1
        self.held.wait()
        self.wanted.append(is_wanted())
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.fixture
def mirror() -> Iterator[Script]:
    made = Script()
    yield made
    made.held.set()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(mirror: Script, said: list[str]) -> Iterator[Start]:
    started: list[RegistryFollower] = []

    def make(limit_s: float = 5.0) -> RegistryFollower:
        started.append(RegistryFollower(mirror.update, "s3://b/tasks", 0.01, said.append, limit_s))
        return started[-1]

    yield make
    for one in started:
        one.close()


def failures(follower: Follower) -> float:
    (metric,) = follower.metrics
    return float(metric.value)


def test_each_failure_is_counted_and_told_once(mirror: Script, said: list[str], start: Start) -> None:
    mirror.outcome = {"one 1": "s3://b/tasks: one is not taken over", "two 2": "two neither"}
    follower = start()
    wait_for(lambda: failures(follower) >= 6)
    prefix = "the copy of the registry is left as it is: "
    assert said == [f"{prefix}s3://b/tasks: one is not taken over", f"{prefix}two neither"]
    mirror.outcome = OverloadedError("s3://b/tasks cannot be read")
    wait_for(lambda: len(said) == 3)
    mirror.outcome = {}
    count = mirror.started
    wait_for(lambda: mirror.started > count + 2)
    mirror.outcome = OverloadedError("s3://b/tasks cannot be read, again")
    wait_for(lambda: len(said) == 4)
    assert said[2:] == [f"{prefix}s3://b/tasks cannot be read", f"{prefix}s3://b/tasks cannot be read, again"]


def test_an_error_that_nobody_expects_ends_no_thread(mirror: Script, said: list[str], start: Start) -> None:
    mirror.outcome = ZeroDivisionError("x")
    follower = start()
    wait_for(lambda: failures(follower) >= 2)
    assert said == ["the copy of the registry is left as it is: ZeroDivisionError: x"]


def test_a_url_that_is_slow_for_ever_holds_up_nothing(mirror: Script, said: list[str], start: Start) -> None:
    mirror.held.clear()
    before = time.monotonic()
    follower = start(limit_s=0.1)
    assert time.monotonic() - before < 60
    wait_for(lambda: failures(follower) >= 3)
    assert said == ["the copy of the registry is left as it is: s3://b/tasks has not been read after 0.1 s"]
    assert mirror.started == 1, "no second one is started meanwhile"
    mirror.held.set()
    wait_for(lambda: mirror.started > 1)
    assert mirror.wanted[0], "one that is late at last is taken"


def test_a_file_that_never_comes_leaves_the_copy_as_it_is(
    remote: RemoteRegistry, tmp_path: Path, said: list[str]
) -> None:
    remote.put("one", "first")
    remote.publish()
    copy = Mirror("tasks_dir", remote.url, LAYOUT, tmp_path / "copy")
    copy.update()
    remote.put("two", "second")
    remote.publish()
    release = threading.Event()
    remote.hold(release)
    follower = RegistryFollower(copy.update, remote.url, 0.01, said.append, 0.05)
    wait_for(lambda: failures(follower) >= 2)
    follower.close()
    assert list(Registry(tmp_path / "copy", "tasks").read().entries) == ["one"]
    assert said == [f"the copy of the registry is left as it is: {remote.url} has not been read after 0.05 s"]
    release.set()
    wait_for(lambda: not list((tmp_path / "copy").glob(".fetch-*")))
    assert list(Registry(tmp_path / "copy", "tasks").read().entries) == ["one"], "what is late comes after the end"


def test_after_the_end_nothing_is_installed(mirror: Script, said: list[str], start: Start) -> None:
    mirror.held.clear()
    follower = start(limit_s=0.01)
    follower.close()
    mirror.held.set()
    wait_for(lambda: bool(mirror.wanted))
    assert mirror.wanted == [False]


def test_the_parameters_name_url_and_period(remote: RemoteRegistry, tmp_path: Path, said: list[str]) -> None:
    remote.put("one", "first")
    remote.publish()
    parameters = {"registry_url": remote.url, "registry_period_s": "1"}
    follower = follow(parameters, tmp_path / "copy", LAYOUT, said.append)
    try:
        assert list(Registry(tmp_path / "copy", "tasks").read().entries) == ["one"], "the first look is waited for"
        remote.put("two", "second")
        remote.publish()
        wait_for(lambda: len(Registry(tmp_path / "copy", "tasks").read().entries) == 2)
    finally:
        follower.close()
    assert said == [] and failures(follower) == 0


def test_without_a_url_there_is_no_thread(tmp_path: Path, said: list[str]) -> None:
    before = set(threading.enumerate())
    follower = follow({}, tmp_path / "copy", LAYOUT, said.append)
    assert list(follower.metrics) == [] and set(threading.enumerate()) <= before
    follower.close()
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("stated", ["0.5", "nan", "100000", "soon"])
def test_the_period_has_limits(tmp_path: Path, stated: str) -> None:
    with pytest.raises(InvalidInputError, match="registry_period_s"):
        follow({"registry_period_s": stated}, tmp_path, LAYOUT, lambda text: None)
