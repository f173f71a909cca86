"""Threads of the front, the worker and the router that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.polymorph.front import TextFront
from shapeshift.polymorph.worker import TextWorker
from tests.fakes import PbUtils, Request, text_request
from tests.stalls import only_stalled, watched, without_patience

if TYPE_CHECKING:
    from tests.polymorph.conftest import Gate, Router


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    without_patience(monkeypatch)


def test_an_engine_thread(make_front: Callable[..., TextFront], gate: Gate, pb_utils: PbUtils) -> None:
    front, request = make_front(), text_request("a text")
    with only_stalled(pb_utils, "engine-0", gate.release):
        gate.hold()
        front.execute([request])
    request.vectors()
    assert watched(pb_utils) == {"execute", "responses", "errors", "engine-0"}


def test_the_thread_that_executes(
    make_front: Callable[..., TextFront], pb_utils: PbUtils, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, request, opened = make_front(), text_request("a text"), threading.Event()
    encode = TextTokenizer.encode

    def wait(*arguments: Any) -> Any:
        assert opened.wait(120)
        return encode(*arguments)

    monkeypatch.setattr(TextTokenizer, "encode", wait)
    with ThreadPoolExecutor(1) as pool, only_stalled(pb_utils, "execute", opened.set):
        pool.submit(front.execute, [request])
    request.vectors()


def test_the_thread_that_responds(make_front: Callable[..., TextFront], pb_utils: PbUtils) -> None:
    front, request, opened = make_front(), text_request("a text"), threading.Event()
    send = request.sender.send

    def wait(*arguments: Any, **options: Any) -> None:
        assert opened.wait(120)
        send(*arguments, **options)

    request.sender.send = wait  # type: ignore[method-assign]
    with only_stalled(pb_utils, "responses", opened.set):
        front.execute([request])
    request.vectors()


def test_a_worker(
    make_worker: Callable[..., TextWorker],
    front_args: Callable[..., dict[str, str]],
    gate: Gate,
    pb_utils: PbUtils,
) -> None:
    front_args(placement="resident", workers=1)
    worker = make_worker()
    request = Request(["EMBEDDING"], INPUT_IDS=np.arange(1, 6), LENGTHS=np.array([5], np.int32))
    with ThreadPoolExecutor(1) as pool, only_stalled(pb_utils, "execute", gate.release):
        gate.hold()
        answer = pool.submit(worker.execute, [request])
    assert not answer.result()[0].has_error()


def test_a_router_that_cannot_watch_its_calls(make_router: Callable[..., Router]) -> None:
    router = make_router(0)
    (counter,) = router.steps
    assert counter.name == "router-watch"
    router.workers["a"].stick()
    asked = router.ask(5)
    router.wait(lambda: router.workers["a"].held > 0)
    with router._lock:
        # It may be about to take the lock.
        router.wait(lambda: bool(counter.position()))
        steps = counter.steps
        assert counter.has_work
        assert counter.steps == steps
    router.wait(lambda: counter.steps > steps)
    router.workers["a"].free()
    assert asked.error() is None
    router.check_rest()
    assert not counter.has_work or counter.position()
