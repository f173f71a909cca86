from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest

from shapeshift.errors import (
    CancelledRequestError,
    EngineError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    UnsupportedError,
)
from shapeshift.serving import replies
from shapeshift.serving.sender import SenderThread
from tests.fakes import InferenceResponse, PbUtils, ResponseSender, TritonError


def test_one_final_response_each_in_order() -> None:
    pb_utils = PbUtils()
    sender = SenderThread(pb_utils, pytest.fail)
    answered: list[int] = []
    targets = [ResponseSender() for _ in range(200)]
    for number, target in enumerate(targets):
        sender.submit(target, InferenceResponse, lambda number=number: answered.append(number))
    sender.close()
    assert answered == list(range(200))
    for target in targets:
        assert target.answer().error() is None


def test_threads_may_submit_at_once() -> None:
    sender = SenderThread(PbUtils(), pytest.fail)
    targets = [ResponseSender() for _ in range(400)]

    def work(number: int) -> None:
        for target in targets[number::4]:
            sender.submit(target, InferenceResponse)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.close()
    for target in targets:
        target.answer()


def test_the_response_is_made_on_the_senders_thread() -> None:
    sender = SenderThread(PbUtils(), pytest.fail)
    where: list[str] = []

    def make() -> InferenceResponse:
        where.append(threading.current_thread().name)
        return InferenceResponse()

    sender.submit(ResponseSender(), make)
    sender.close()
    assert where == ["sender"]


def test_submit_does_not_wait_and_close_flushes() -> None:
    sender = SenderThread(PbUtils(), pytest.fail)
    gate = threading.Event()
    blocked, behind = ResponseSender(), ResponseSender()

    def slow() -> InferenceResponse:
        assert gate.wait(30)
        return InferenceResponse()

    sender.submit(blocked, slow)
    sender.submit(behind, InferenceResponse)
    assert not blocked.responses and not behind.responses
    gate.set()
    sender.close()
    assert len(blocked.responses) == len(behind.responses) == 1


def test_a_send_that_raises_is_logged_and_the_next_is_sent() -> None:
    logged: list[str] = []
    sender = SenderThread(PbUtils(), logged.append)
    after: list[str] = []
    sender.submit(ResponseSender(fail=RuntimeError("the caller is gone")), InferenceResponse, lambda: after.append("a"))
    good = ResponseSender()
    sender.submit(good, InferenceResponse, lambda: after.append("b"))
    sender.close()
    good.answer()
    assert after == ["a", "b"]
    assert logged == ["a response could not be sent: the caller is gone"]


def test_a_response_that_cannot_be_made_becomes_an_error() -> None:
    """Without one, the caller would wait for ever."""
    logged: list[str] = []
    sender = SenderThread(PbUtils(), logged.append)

    def make() -> InferenceResponse:
        raise KeyError("LOGITS")

    target, good = ResponseSender(), ResponseSender()
    sender.submit(target, make)
    sender.submit(good, InferenceResponse)
    sender.close()
    error = target.answer().error()
    assert error is not None and error.code() == TritonError.INTERNAL and "LOGITS" in error.message()
    assert good.answer().error() is None
    assert len(logged) == 1 and "LOGITS" in logged[0]


def test_nothing_is_held_while_it_waits() -> None:
    """Triton keeps a model alive for as long as one of its response senders lives."""
    sender = SenderThread(PbUtils(), pytest.fail)
    target = ResponseSender()
    sent = threading.Event()
    sender.submit(target, InferenceResponse, partial(note, target, sent))
    assert sent.wait(30)
    held = weakref.ref(target)
    del target
    deadline = time.monotonic() + 30
    while held() is not None:
        assert time.monotonic() < deadline
        gc.collect()
    sender.close()


def note(target: ResponseSender, sent: threading.Event) -> None:
    """What is called after a response; it holds the response's sender as a real request does."""
    sent.set()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError("f", 1, "2"), TritonError.INVALID_ARG),
        (NotFoundError("x"), TritonError.NOT_FOUND),
        (OverloadedError("x"), TritonError.UNAVAILABLE),
        (UnsupportedError("x"), TritonError.UNSUPPORTED),
        (CancelledRequestError("x"), TritonError.CANCELLED),
        (EngineError("x"), TritonError.INTERNAL),
        (ValueError("x"), TritonError.INTERNAL),
    ],
)
def test_codes(error: Exception, code: int) -> None:
    made = replies.triton_error(PbUtils(), error)
    assert made.code() == code
    assert getattr(TritonError, replies.code_name(error)) == code
    own = not isinstance(error, ValueError)
    assert made.message() == (str(error) if own else "ValueError: x")
    assert replies.error_response(PbUtils(), error).has_error()


class OldError:
    """The error type of a server from before most codes."""

    INTERNAL = 1

    def __init__(self, message: str, code: int) -> None:
        self.code = code


def test_a_code_that_the_server_lacks_becomes_internal() -> None:
    pb_utils = PbUtils()
    pb_utils.TritonError = OldError
    assert replies.triton_error(pb_utils, CancelledRequestError("x")).code == OldError.INTERNAL
