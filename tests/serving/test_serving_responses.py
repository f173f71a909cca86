from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError, OverloadedError
from shapeshift.serving import pb_utils as triton
from shapeshift.serving.metrics import RequestMetrics
from shapeshift.serving.responses import Responder, ResponseThread, SingleResponse
from tests.fakes import InferenceResponse, PbUtils, Request, ResponseSender, TritonError, send_returned
from tests.waiting import wait_for


def test_one_final_response_each_in_order() -> None:
    pb_utils = PbUtils()
    thread = ResponseThread(pb_utils, pytest.fail)
    answered: list[int] = []
    targets = [ResponseSender() for _ in range(200)]
    for number, target in enumerate(targets):
        thread.post([SingleResponse(target, InferenceResponse, partial(answered.append, number))])
    thread.close()
    assert answered == list(range(200))
    for target in targets:
        assert target.answer().error() is None


def test_threads_may_submit_at_once() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
    targets = [ResponseSender() for _ in range(400)]

    def work(number: int) -> None:
        for target in targets[number::4]:
            thread.post([SingleResponse(target, InferenceResponse)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for poster in threads:
        poster.start()
    for poster in threads:
        poster.join()
    thread.close()
    for target in targets:
        target.answer()


def test_the_response_is_made_on_the_sending_thread() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
    where: list[str] = []

    def make() -> InferenceResponse:
        where.append(threading.current_thread().name)
        return InferenceResponse()

    thread.post([SingleResponse(ResponseSender(), make)])
    thread.close()
    assert where == ["responses"]


def test_submit_does_not_wait_and_close_flushes() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
    release = threading.Event()
    blocked, behind = ResponseSender(), ResponseSender()

    def slow() -> InferenceResponse:
        assert release.wait(120)
        return InferenceResponse()

    thread.post([SingleResponse(blocked, slow)])
    thread.post([SingleResponse(behind, InferenceResponse)])
    assert not blocked.responses and not behind.responses
    release.set()
    thread.close()
    assert len(blocked.responses) == len(behind.responses) == 1


def test_a_send_that_raises_is_logged_and_the_next_is_sent() -> None:
    logged: list[str] = []
    thread = ResponseThread(PbUtils(), logged.append)
    after: list[str] = []
    thread.post(
        [
            SingleResponse(
                ResponseSender(fail=RuntimeError("the caller is gone")), InferenceResponse, lambda: after.append("a")
            )
        ]
    )
    good = ResponseSender()
    thread.post([SingleResponse(good, InferenceResponse, lambda: after.append("b"))])
    thread.close()
    good.answer()
    assert after == ["a", "b"]
    assert logged == ["a response could not be sent: the caller is gone"]


def test_a_response_that_cannot_be_made_becomes_an_error() -> None:
    """Without one, the caller would wait for ever."""
    logged: list[str] = []
    thread = ResponseThread(PbUtils(), logged.append)

    def make() -> InferenceResponse:
        raise KeyError("LOGITS")

    target, good = ResponseSender(), ResponseSender()
    thread.post([SingleResponse(target, make)])
    thread.post([SingleResponse(good, InferenceResponse)])
    thread.close()
    error = target.answer().error()
    assert error is not None and error.code() == TritonError.INTERNAL and "LOGITS" in error.message()
    assert good.answer().error() is None
    assert len(logged) == 1 and "LOGITS" in logged[0]


def test_nothing_is_held_while_it_waits() -> None:
    """Triton keeps a model alive for as long as one of its response senders lives."""
    thread = ResponseThread(PbUtils(), pytest.fail)
    target = ResponseSender()
    sent = threading.Event()
    thread.post([SingleResponse(target, InferenceResponse, partial(note, target, sent))])
    assert sent.wait(120)
    held = weakref.ref(target)
    del target
    deadline = time.monotonic() + 120
    while held() is not None:
        assert time.monotonic() < deadline
        gc.collect()
    thread.close()


def note(target: ResponseSender, sent: threading.Event) -> None:
    """What is called after a response; it holds the response's sender as a real request does."""
    sent.set()


# Streams of several responses.


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

    def sent(self, last: bool) -> None:
        self.handed.append(last)

    def broken(self) -> None:
        self.broke += 1


def test_what_gathers_meanwhile_goes_out_together() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
    release, blocker, stream = threading.Event(), Pieces(), Pieces()
    blocker.before = lambda: None if release.wait(30) else pytest.fail("held too long")
    blocker.last = True
    thread.post([blocker])
    for number in range(5):
        stream.waiting.append(number)
        thread.post([stream])
    release.set()
    stream.last = True
    thread.post([stream])
    thread.close()
    assert sum(stream.told, []) == [0, 1, 2, 3, 4]
    assert len(stream.told) < 5
    assert len(stream.target.stream()) == len(stream.told)
    assert stream.handed[-1] is True and not any(stream.handed[:-1])


def test_nothing_follows_the_last_response() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
    stream = Pieces()
    stream.last = True
    for _ in range(4):
        thread.post([stream])
    thread.close()
    assert len(stream.target.stream()) == 1
    assert stream.response_sender is None


def test_streams_do_not_mix() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
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
    thread = ResponseThread(PbUtils(), logged.append)
    broken, good = Pieces(), Pieces()

    def fail() -> None:
        raise InvalidInputError("x", 1, "y")

    broken.before = fail
    good.last = True
    thread.post([broken, good])
    thread.close()
    (response,) = broken.target.stream()
    error = response.error()
    assert error is not None and error.code() == TritonError.INVALID_ARG
    assert good.target.stream() and len(logged) == 1


def test_a_response_that_cannot_be_sent_is_told_and_others_go_on() -> None:
    logged: list[str] = []
    thread = ResponseThread(PbUtils(), logged.append)
    lost, good = Pieces(ResponseSender(fail=RuntimeError("gone"))), Pieces()
    lost.waiting.append(1)
    good.last = True
    thread.post([lost, good])
    thread.close()
    assert lost.broke == 1 and "gone" in logged[0]
    good.target.stream()


def test_one_response_is_the_last() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
    sender, after = ResponseSender(), threading.Event()
    thread.post([SingleResponse(sender, InferenceResponse, after.set)])
    sender.answer()
    assert after.wait(120)
    thread.close()


def test_senders_are_let_go() -> None:
    thread = ResponseThread(PbUtils(), pytest.fail)
    sender = ResponseSender()
    thread.post([SingleResponse(sender, InferenceResponse)])
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


# What a front answers and counts.


@pytest.fixture
def responder() -> Iterator[tuple[Responder, RequestMetrics]]:
    metrics = RequestMetrics("texts", 1, 0)
    made = Responder(PbUtils(), metrics, pytest.fail)
    yield made, metrics
    made.close()


@pytest.fixture
def decoupled() -> Iterator[tuple[Responder, RequestMetrics]]:
    """Of a decoupled model, whose `execute` returns nothing."""
    metrics = RequestMetrics("texts", 1, 0)
    made = Responder(PbUtils(), metrics, pytest.fail, decoupled=True)
    yield made, metrics
    made.close()


def test_a_served_request_is_counted_after_it_was_sent(responder: tuple[Responder, RequestMetrics]) -> None:
    made, metrics = responder
    order: list[str] = []
    target = ResponseSender()

    def make() -> InferenceResponse:
        order.append("made")
        return InferenceResponse()

    made.send(target, make, time.monotonic(), order.append, lambda: order.append("before"))
    made.close()
    target.answer()
    assert order == ["before", "made", "OK"]
    assert metrics.answered["OK"].value == 1 and metrics.latency_ms.totals()[0][-1] == 1


def test_an_answer_that_cannot_be_made_counts_as_its_error() -> None:
    metrics, log, target = RequestMetrics("texts", 1, 0), list[str](), ResponseSender()
    made = Responder(PbUtils(), metrics, log.append)

    def make() -> InferenceResponse:
        raise InvalidInputError("TEXT", 3, "a string")

    ended: list[str] = []
    made.send(target, make, time.monotonic(), ended.append)
    made.close()
    error = target.answer().error()
    assert error is not None and error.code() == TritonError.INVALID_ARG and len(log) == 1
    assert ended == ["INVALID_ARG"], "what is logged and traced is what is counted"
    assert metrics.answered["INVALID_ARG"].value == 1 and metrics.answered["OK"].value == 0
    assert metrics.latency_ms.totals()[0][-1] == 0


@pytest.mark.parametrize("kind", ["responder", "decoupled"])
def test_what_submit_raises_is_the_answer_of_that_request_alone(kind: str, request: pytest.FixtureRequest) -> None:
    made, metrics = request.getfixturevalue(kind)
    requests = [Request(), Request(parameters={"forwarded": True}), Request()]
    accepted: list[object] = []

    def submit(request: triton.InferenceRequest, sender: triton.ResponseSender) -> None:
        if request is not requests[2]:
            raise InvalidInputError("TEXT", 3, "a string")
        accepted.append(request)

    returned = made.start(requests, submit)
    made.close()
    if kind == "responder":
        # Nothing was sent: Triton takes one response.
        assert returned is not None and returned[2] is None and not any(one.sender.responses for one in requests)
        send_returned(requests, returned)
    else:
        assert returned is None
    plain, coded = (request.sender.answer().error() for request in requests[:2])
    assert plain is not None and coded is not None
    assert (plain.code(), plain.message()) == (TritonError.INVALID_ARG, "TEXT: got 3; a string")
    assert coded.message() == "[INVALID_ARG] TEXT: got 3; a string"
    assert accepted == [requests[2]] and metrics.answered["INVALID_ARG"].value == 2
    assert metrics.latency_ms.totals()[0][-1] == 0


# Refusals.


class HeldSender(ResponseSender):
    """A sender whose `send` waits, as Triton's does under load, until `release`."""

    release, sending = threading.Event(), threading.Event()

    def send(self, response: triton.InferenceResponse, flags: int = 0) -> None:
        self.sending.set()
        assert self.release.wait(120)
        super().send(response, flags)


@pytest.fixture
def held() -> threading.Event:
    """The event that lets every HeldSender send."""
    HeldSender.release, HeldSender.sending = threading.Event(), threading.Event()
    return HeldSender.release


def refuse(request: triton.InferenceRequest, sender: triton.ResponseSender) -> None:
    raise OverloadedError("full")


def test_a_refusal_does_not_wait_for_answers(
    decoupled: tuple[Responder, RequestMetrics], held: threading.Event
) -> None:
    made, metrics = decoupled
    answers = [HeldSender() for _ in range(3)]
    for sender in answers:
        made.send(sender, InferenceResponse, time.monotonic())
    refused, failed = Request(decoupled=True), ResponseSender()
    made.start([refused], refuse)
    made.fail(failed, OverloadedError("latency_ms ran out"))
    assert refused.refusal() == (TritonError.UNAVAILABLE, "full")
    failed.answer()
    assert not any(sender.responses for sender in answers)
    held.set()
    made.close()
    assert all(sender.answer().error() is None for sender in answers)
    assert metrics.answered["OK"].value == 3 and metrics.answered["UNAVAILABLE"].value == 2


def test_refusals_that_wait_are_bounded_and_none_is_lost(
    held: threading.Event,
) -> None:
    made = Responder(PbUtils(), RequestMetrics("texts", 1, 0), pytest.fail, decoupled=True)
    # 64 refusals may wait.
    requests = [Request() for _ in range(70)]
    submitted: list[object] = []
    for request in requests:
        request.sender = HeldSender()

    def submit(request: triton.InferenceRequest, sender: triton.ResponseSender) -> None:
        submitted.append(request)
        refuse(request, sender)

    executing = threading.Thread(target=made.start, args=(requests, submit))
    executing.start()
    wait_for(lambda: len(submitted) == 65)
    executing.join(0.05)
    assert executing.is_alive() and submitted == requests[:65]
    held.set()
    executing.join(30)
    made.close()
    assert [request.refusal()[1] for request in requests] == ["full"] * 70


def test_requests_are_refused_while_too_many_answers_wait_to_be_sent(
    held: threading.Event,
) -> None:
    made = Responder(PbUtils(), RequestMetrics("texts", 1, 0), pytest.fail)
    accepted: list[triton.InferenceRequest] = []

    def submit(request: triton.InferenceRequest, sender: triton.ResponseSender) -> None:
        accepted.append(request)
        made.send(sender, InferenceResponse, time.monotonic())

    requests = [Request() for _ in range(1027)]
    for request in requests:
        request.sender = HeldSender()
    assert made.start(requests[:1], submit) is None
    # The first one is being sent; 1024 may wait behind it.
    assert HeldSender.sending.wait(120)
    returned = made.start(requests[1:], submit)
    held.set()
    send_returned(requests[1:], returned)
    made.close()
    assert accepted == requests[:1025]
    limit = "responses: 1024 answers wait to be sent, 1 more would exceed 1024; retry later"
    assert [request.refusal() for request in requests[1025:]] == [(TritonError.UNAVAILABLE, limit)] * 2
