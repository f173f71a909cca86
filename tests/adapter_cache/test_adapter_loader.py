"""The thread that loads adapters: one after another, through the host's memory where there is one, and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shapeshift.adapter_cache.memory import loader
from shapeshift.adapter_cache.memory.loader import Loader
from tests.waiting import wait_for


def adapter(name: str) -> Any:
    return SimpleNamespace(name=name, label=name)


class Case:
    """loaded: by adapter, what was reported; weights: what is done in place of reading files."""

    def __init__(self) -> None:
        self.loaded: dict[str, Exception | None] = {}
        self.seconds: list[float] = []
        self.weights: Callable[[torch.Tensor, Any, Callable[[], None]], None] = lambda target, one, pause: None
        self.made: list[Loader] = []

    def start(self, **options: Any) -> Loader:
        self.made.append(Loader(self._note, self._fill, **options))
        return self.made[-1]

    def load(self, running: Loader, name: str) -> torch.Tensor:
        target = torch.zeros(4)
        running.submit(adapter(name), target)
        wait_for(lambda: name in self.loaded)
        return target

    def _fill(self, target: torch.Tensor, adapter: Any, *, pause: Callable[[], None]) -> None:
        self.weights(target, adapter, pause)

    def _note(self, one: Any, error: Exception | None, seconds: float) -> None:
        self.loaded[one.name] = error
        self.seconds.append(seconds)


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    for one in made.made:
        one.close()


def test_a_load_that_fails_is_reported_and_the_next_one_is_made(case: Case) -> None:
    running, failure = case.start(), OSError("away")

    def weights(target: torch.Tensor, one: Any, pause: Callable[[], None]) -> None:
        if one.name == "bad":
            raise failure
        target.fill_(3)

    case.weights = weights
    assert case.load(running, "bad").tolist() == [0.0] * 4
    assert case.load(running, "good").tolist() == [3.0] * 4
    assert case.loaded == {"bad": failure, "good": None} and min(case.seconds) >= 0


def test_the_time_of_a_load_is_that_between_its_begin_and_its_end(case: Case) -> None:
    began = time.monotonic()
    case.weights = lambda target, one, pause: time.sleep(0.02)
    case.load(case.start(), "a")
    assert 0.02 <= case.seconds[0] <= time.monotonic() - began


def test_close_finishes_the_current_load_and_leaves_those_that_wait(case: Case) -> None:
    loading, may_end = threading.Event(), threading.Event()

    def weights(target: torch.Tensor, one: Any, pause: Callable[[], None]) -> None:
        loading.set()
        assert may_end.wait(120)

    case.weights = weights
    running = case.start()
    for name in ("current", "waits"):
        running.submit(adapter(name), torch.zeros(1))
    assert loading.wait(120)
    running.close(timeout_s=0.0)
    may_end.set()
    running.close(timeout_s=30)
    assert list(case.loaded) == ["current"]


class Host:
    """Images in the memory of the host, by name. calls: in order."""

    def __init__(self) -> None:
        self.images: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    def get(self, name: str) -> torch.Tensor | None:
        self.calls.append(f"get {name}")
        return self.images.get(name)

    def reserve(self, name: str, target: torch.Tensor) -> torch.Tensor:
        self.calls.append(f"reserve {name}")
        self.images[name] = torch.zeros_like(target)
        return self.images[name]

    def drop(self, name: str) -> None:
        self.calls.append(f"drop {name}")
        del self.images[name]


def test_what_the_host_holds_is_copied_and_not_read_again(case: Case) -> None:
    host, read = Host(), []

    def weights(target: torch.Tensor, one: Any, pause: Callable[[], None]) -> None:
        read.append(one.name)
        target.fill_(len(read))

    case.weights = weights
    running = case.start(host=host)
    for _ in range(2):
        case.loaded.clear()
        assert case.load(running, "a").tolist() == [1.0] * 4
    assert read == ["a"] and host.calls == ["get a", "reserve a", "get a"]


def test_an_image_that_could_not_be_read_is_dropped(case: Case) -> None:
    host, failure = Host(), ValueError("odd")

    def weights(target: torch.Tensor, one: Any, pause: Callable[[], None]) -> None:
        raise failure

    case.weights = weights
    assert case.load(case.start(host=host), "a").tolist() == [0.0] * 4
    assert case.loaded == {"a": failure} and host.images == {}
    assert host.calls == ["get a", "reserve a", "drop a"]


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_load_pauses_for_a_share_of_its_processor_time_while_requests_run(case: Case, is_busy: bool) -> None:
    """A program beside it can only make it slower, so that the shortest of several pauses counts."""
    used_s, waits = 0.01, list[float]()

    def weights(target: torch.Tensor, one: Any, pause: Callable[[], None]) -> None:
        end = time.thread_time() + used_s
        while time.thread_time() < end:
            pass
        start = time.monotonic()
        pause()
        waits.append(time.monotonic() - start)

    case.weights = weights
    running = case.start(is_busy=lambda: is_busy)
    for number in range(5):
        case.load(running, f"a{number}")
    assert (min(waits) >= loader.PAUSE * used_s) == is_busy
