"""Engines that a serving process loads in the background."""

from __future__ import annotations

import os
import threading

import pytest

from shapeshift.engines.execution.engine_set import BackgroundLoader
from shapeshift.engines.manifest import EngineEntry
from tests.waiting import wait_for


def entry(tokens: int) -> EngineEntry:
    return EngineEntry(file="", tokens=tokens, rows=1, max_error=0.0, min_cosine=1.0, latency=())


def test_the_thread_yields_the_processor_to_those_that_serve() -> None:
    niceness: list[int] = []

    def load(_: EngineEntry) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    loader = BackgroundLoader([entry(16)], load, [0] * 17, 10**6, lambda line: None)
    assert loader.wait(120)
    assert niceness == [min(own + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_lengths_with_the_most_requests_come_first_and_a_failure_stops_none() -> None:
    loaded: list[int | None] = []

    def load(one: EngineEntry) -> None:
        loaded.append(one.tokens)
        if one.tokens == 32:
            raise OSError("cannot be read")

    seen = [0] * 65
    seen[20], seen[64] = 5, 3
    log: list[str] = []
    assert BackgroundLoader([entry(16), entry(32), entry(64)], load, seen, 10**6, log.append).wait(120)
    assert loaded == [32, 64, 16]
    assert len(log) == 1 and "32 cannot be loaded" in log[0] and "cannot be read" in log[0]


def test_it_is_told_before_the_first_engine() -> None:
    order: list[object] = []
    loader = BackgroundLoader(
        [entry(16)], lambda one: order.append(one.tokens), [0] * 17, 10**6, print, start=lambda: order.append("start")
    )
    assert loader.wait(120) and order == ["start", 16]


@pytest.mark.parametrize(("used_mb", "loaded"), [(99.0, 2), (100.0, 2), (100.5, 0)])
def test_above_its_memory_no_engine_is_loaded(used_mb: float, loaded: int) -> None:
    found: list[EngineEntry] = []
    log: list[str] = []
    loader = BackgroundLoader([entry(16), entry(32)], found.append, [0] * 33, 100, log.append, used_mb=lambda: used_mb)
    assert loader.wait(120) and len(found) == loaded
    assert log == ([] if loaded else ["memory_mb: 100 MiB used, limit 100; 2 engines are not loaded"])


def test_a_text_counts_for_the_engine_of_the_next_length() -> None:
    # Four texts of 16 tokens, three of 17 to 32.
    seen = [0] * 33
    seen[16], seen[17], seen[32] = 4, 2, 1
    order: list[int | None] = []
    for more in (0, 2):
        seen[32] += more
        loader = BackgroundLoader([entry(16), entry(32)], lambda one: order.append(one.tokens), seen, 10**6, print)
        assert loader.wait(120)
    assert order == [16, 32, 32, 16]


def test_close_waits_for_the_engine_that_is_being_loaded_and_starts_no_other() -> None:
    loading, may_end = threading.Event(), threading.Event()
    loaded: list[int | None] = []

    def load(one: EngineEntry) -> None:
        loading.set()
        assert may_end.wait(120)
        loaded.append(one.tokens)

    loader = BackgroundLoader([entry(16), entry(32)], load, [0] * 33, 10**6, print)
    assert loading.wait(120) and not loader.wait(0.0)
    closing = threading.Thread(target=loader.close)
    closing.start()
    wait_for(loader._stopping.is_set)
    may_end.set()
    closing.join(30)
    assert loaded == [16] and loader.wait(0.0)
