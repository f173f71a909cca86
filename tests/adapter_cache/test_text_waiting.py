"""Which requests for texts go to the engines, and when, as their adapters come into memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from shapeshift.adapter_cache.memory.adapter_table import Adapter
from shapeshift.adapter_cache.text.base import PackAdapters
from shapeshift.adapter_cache.text.waiting import WaitingTexts
from shapeshift.engines.execution.request import TextRequest
from shapeshift.errors import EngineError, OverloadedError
from tests.adapter_cache.toy_memory import ToyMemory

SIZES = {"a": 40, "b": 40, "c": 40}


class Named:
    """As much of an adapter as a queue reads."""

    def __init__(self, name: str) -> None:
        self.name = self.label = name


class Cache(ToyMemory):
    """A memory for two of the adapters, which loads those that are waited for."""

    def begin_iteration(self) -> None:
        for name, count in self.waiting.items():
            if count and name is not None:
                self.start_load(name, spared=[one for one, number in self.waiting.items() if one and number])


class Texts:
    """Requests that wait, and those that were submitted, in order."""

    def __init__(self, most_rows: int = 100, error: Exception | None = None) -> None:
        self.cache = Cache(total_tokens=100, sizes=SIZES)
        self.submitted: list[TextRequest] = []
        self.answered: list[TextRequest] = []
        self._error = error
        self.waiting = WaitingTexts(self._submit, most_rows)
        self.waiting.cache = cast(Any, self.cache)

    def _submit(self, request: TextRequest) -> None:
        if self._error is not None:
            raise self._error
        self.submitted.append(request)

    def add(self, name: str, rows: int = 1, latency_ms: float | None = None) -> TextRequest:
        request = TextRequest([np.array([5])] * rows, self.answered.append, latency_ms)
        request.adapter = cast(Adapter, Named(name))
        self.waiting.add(request)
        return request

    def load(self) -> None:
        """End the oldest load."""
        self.cache.end_load()
        self.waiting.advance()

    @property
    def order(self) -> list[str]:
        return [request.adapter.name for request in self.submitted]


def test_a_load_blocks_no_other_request() -> None:
    texts = Texts()
    texts.cache.loaded.add("b")
    for name in ("a", "b", "a", "b"):
        texts.add(name)
    assert texts.order == ["b", "b"] and len(texts.waiting) == 2
    assert texts.waiting.labels == ({"b"}, {"a"})
    texts.load()
    assert texts.order == ["b", "b", "a", "a"] and len(texts.waiting) == 0


def test_what_is_in_use_leaves_no_memory_to_others() -> None:
    texts = Texts()
    texts.cache.loaded |= {"a", "b"}
    first, second, third = (texts.add(name) for name in "abc")
    texts.load()
    assert texts.submitted == [first, second] and "c" not in texts.cache.loaded
    texts.waiting.release(first)
    texts.load()
    assert texts.submitted == [first, second, third] and "a" not in texts.cache.loaded
    for request in (first, second, third, third):
        texts.waiting.release(request)
    assert not any(texts.cache.users.values()), "a second release counts nothing"


def test_adapters_in_use_without_a_pause_hold_up_no_other() -> None:
    texts = Texts()
    texts.cache.loaded |= {"a", "b"}
    running = [texts.add(name) for name in "ab"]
    last = texts.add("c")
    for number in range(100):
        running.append(texts.add("ab"[number % 2]))
        texts.waiting.release(running.pop(0))
        texts.load()
    assert last in texts.submitted and texts.submitted.index(last) < 40
    for request in running:
        texts.waiting.release(request)
        texts.load()
    assert len(texts.submitted) > 90, "the others go on"


def test_requests_that_have_ended_do_not_wait() -> None:
    texts = Texts()
    cancelled, late, failing = texts.add("a"), texts.add("a", latency_ms=1e-3), texts.add("b")
    cancelled.fail(EngineError("gone"))
    texts.waiting.release(cancelled)
    texts.waiting.fail_late()
    assert isinstance(late.error, OverloadedError)
    texts.waiting.fail(failing.adapter, EngineError("no such file"))
    assert str(failing.error) == "no such file"
    texts.load()
    assert texts.submitted == [] and len(texts.waiting) == 0
    assert not any(texts.cache.waiting.values())


def test_a_request_that_is_refused_is_answered_so() -> None:
    texts = Texts(error=OverloadedError("queue_rows: full"))
    texts.cache.loaded.add("a")
    request = texts.add("a")
    assert str(request.error) == "queue_rows: full" and texts.answered == [request]
    texts.waiting.release(request)
    assert not any(texts.cache.users.values())


class Leaving:
    """An adapter that leaves the memory once its places have been read."""

    head = ()
    read = False

    @property
    def places(self) -> torch.Tensor | None:
        before, self.read = self.read, True
        return None if before else torch.ones(1, 1, 3, 4, dtype=torch.int64)


def test_an_adapter_that_leaves_the_memory_meanwhile_fails_no_pack() -> None:
    request = TextRequest([np.array([5, 6])], lambda ended: None)
    request.adapter = Leaving()
    pack = PackAdapters(torch.zeros(8), ())
    assert pack(request.rows) is not None and pack(request.rows) is None


def test_the_rows_that_wait_are_bounded() -> None:
    texts = Texts(most_rows=3)
    first = texts.add("a", rows=5)
    with pytest.raises(OverloadedError, match="queue_rows: 5 rows wait, 1 more would exceed 3"):
        texts.add("b")
    texts.waiting.close()
    assert isinstance(first.error, OverloadedError)
    with pytest.raises(OverloadedError, match="unloaded"):
        texts.add("a")
