"""Engines that a serving process loads in the background."""

from __future__ import annotations

import os
import threading

from shapeshift.engines.execution.loading import BackgroundLoader
from shapeshift.engines.manifest import EngineEntry


def entry(tokens: int) -> EngineEntry:
    return EngineEntry(file="", tokens=tokens, rows=1, max_error=0.0, min_cosine=1.0, latency=())


def test_the_thread_yields_the_processor_to_those_that_serve() -> None:
    niceness: list[int] = []

    def load(_: EngineEntry) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    loader = BackgroundLoader([entry(16)], load, [0] * 17, 10**6, lambda line: None)
    assert loader.wait(60)
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
    assert BackgroundLoader([entry(16), entry(32), entry(64)], load, seen, 10**6, log.append).wait(60)
    assert loaded == [32, 64, 16]
    assert len(log) == 1 and "32 cannot be loaded" in log[0] and "cannot be read" in log[0]
