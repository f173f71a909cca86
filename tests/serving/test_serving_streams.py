from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.serving.streams import OneResponse, StreamThread
from tests.fakes import InferenceResponse, PbUtils, ResponseSender, TritonError


class Pieces:
    """A stream of numbers; each response holds what has gathered since the last."""

    def __init__(self, sender: ResponseSender | None = None) -> None:
        self.response_sender: Any = sender or ResponseSender(decoupled=True)
        self.target = self.response_sender
        self.waiting: list[int] = []
        self.last = False
        self.told: list[list[int]] = []
        self.handed: list[bool] = []
        self.broke = 0
        self.before: Callable[[], None] = lambda: None

    def next_response(self) -> tuple[Any, bool] | None:
        self.before()
        last = self.last
        if not self.waiting and not last:
            return None
        told, self.waiting = self.waiting, []
        self.told.append(told)
        return InferenceResponse(), last

    def handed_over(self, last: bool) -> None:
        self.handed.append(last)

    def broken(self) -> None:
        self.broke += 1


def test_what_gathers_meanwhile_goes_out_together() -> None:
    thread = StreamThread(PbUtils(), pytest.fail)
    gate, blocker, stream = threading.Event(), Pieces(), Pieces()
    blocker.before = lambda: None if gate.wait(30) else pytest.fail("held too long")
    blocker.last = True
    thread.post([blocker])
    for number in range(5):
        stream.waiting.append(number)
        thread.post([stream])
    gate.set()
    stream.last = True
    thread.post([stream])
    thread.close()
    assert sum(stream.told, []) == [0, 1, 2, 3, 4]
    assert len(stream.told) < 5
    assert len(stream.target.stream()) == len(stream.told)
    assert stream.handed[-1] is True and not any(stream.handed[:-1])


def test_nothing_follows_the_last_response() -> None:
    thread = StreamThread(PbUtils(), pytest.fail)
    stream = Pieces()
    stream.last = True
    for _ in range(4):
        thread.post([stream])
    thread.close()
    assert len(stream.target.stream()) == 1
    assert stream.response_sender is None


def test_streams_do_not_mix() -> None:
    thread = StreamThread(PbUtils(), pytest.fail)
    streams = [Pieces() for _ in range(20)]
    for number in range(100):
        for at, stream in enumerate(streams):
            stream.waiting.append(100 * at + number)
        thread.post(list(streams))
    for stream in streams:
        stream.last = True
    thread.post(streams)
    thread.close()
    for at, stream in enumerate(streams):
        assert sum(stream.told, []) == [100 * at + number for number in range(100)]


def test_a_response_that_cannot_be_made_is_an_error_and_the_last() -> None:
    logged: list[str] = []
    thread = StreamThread(PbUtils(), logged.append)
    broken, good = Pieces(), Pieces()

    def fail() -> None:
        raise InvalidInputError("x", 1, "y")

    broken.before = fail
    good.last = True
    thread.post([broken, good])
    thread.close()
    (response,) = broken.target.stream()
    assert response.error().code() == TritonError.INVALID_ARG
    assert good.target.stream() and len(logged) == 1


def test_a_response_that_cannot_be_sent_is_told_and_others_go_on() -> None:
    logged: list[str] = []
    thread = StreamThread(PbUtils(), logged.append)
    lost, good = Pieces(ResponseSender(fail=RuntimeError("gone"))), Pieces()
    lost.waiting.append(1)
    good.last = True
    thread.post([lost, good])
    thread.close()
    assert lost.broke == 1 and "gone" in logged[0]
    good.target.stream()


def test_one_response() -> None:
    thread = StreamThread(PbUtils(), pytest.fail)
    sender, after = ResponseSender(), threading.Event()
    thread.post([OneResponse(sender, InferenceResponse, after.set)])
    sender.answer()
    assert after.wait(30)
    thread.close()


def test_senders_are_let_go() -> None:
    thread = StreamThread(PbUtils(), pytest.fail)
    sender = ResponseSender()
    thread.post([OneResponse(sender, InferenceResponse)])
    sender.answer()
    held = weakref.ref(sender)
    del sender
    idle = Pieces()
    idle.last = True
    thread.post([idle])
    idle.target.stream()
    gc.collect()
    assert held() is None
    thread.close()
