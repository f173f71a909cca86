"""Responses to Triton: the threads that send them, and how a front answers a request.

`ResponseSender.send` blocks for milliseconds while other threads are busy, so a thread that computes never calls it.
It posts the streams that have something to send. The sending thread asks each stream for its response when the
stream's turn comes, so everything that has gathered since the last response leaves in one. Errors have a thread of
their own: they do not wait for the answers before them. A refusal on arrival does not go through a thread at all where
`execute` may return it, which is when a model is not decoupled.

Cancellations are noticed here too. `is_cancelled` asks the server's process, so a thread that computes never calls it.
A call after the request's last response was sent crashes the server (24.10): the sending thread removes the request
first.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

from shapeshift.serving import error_codes
from shapeshift.serving.bounds import Bound
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import RequestMetrics
from shapeshift.serving.model_args import Log
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender, Returned

# New requests are refused while so many answers wait to be sent.
_MAX_UNSENT = 1024
# Of a decoupled model: `execute` waits while so many refusals wait to be sent. Further requests then stay with Triton.
_MAX_REFUSALS = 64
_ASK_PERIOD_S = 0.1
_MOST_ASKED = 64
# Most requests are answered before they are worth a question, which takes Triton's time and the sending thread's.
_ASK_AFTER_S = 0.25

Make = Callable[[], InferenceResponse]
Submit = Callable[[InferenceRequest, ResponseSender], None]


class ResponseStream(Protocol):
    """The responses to one request. Only the sending thread calls these methods."""

    response_sender: ResponseSender | None
    """Triton's; None after the last response."""

    def next_response(self) -> tuple[InferenceResponse, bool] | None:
        """The response for what has gathered, and whether it is the last; None where nothing has gathered."""
        ...

    def sent(self, last: bool) -> None:
        """The response was sent, or could not be."""
        ...

    def broken(self) -> None:
        """A response could not be sent: the client reads no further ones."""
        ...


class SingleResponse:
    """A stream of one response, which `make` returns; `after` is called once it was sent or could not be."""

    def __init__(self, response_sender: ResponseSender, make: Make, after: Callable[[], None] | None = None) -> None:
        self.response_sender: ResponseSender | None = response_sender
        self._make = make
        self._after = after

    def next_response(self) -> tuple[InferenceResponse, bool]:
        return self._make(), True

    def sent(self, last: bool) -> None:
        if self._after is not None:
            self._after()

    def broken(self) -> None:
        """No further response follows."""


class _Served(SingleResponse):
    """The answer to a request that was served; `ended` is called with `code`, or why the answer could not be made."""

    def __init__(self, response_sender: ResponseSender, make: Make, ended: Callable[[str], None], code: str) -> None:
        super().__init__(response_sender, make)
        self._ended = ended
        self._code = code

    def next_response(self) -> tuple[InferenceResponse, bool]:
        try:
            return super().next_response()
        except Exception as error:
            self._code = error_codes.code_name(error)
            raise

    def sent(self, last: bool) -> None:
        self._ended(self._code)


class ResponseThread:
    """Sends the responses of many streams in order of posting, and nothing after a stream's last one."""

    def __init__(self, pb_utils: PbUtils, log: Log, name: str = "responses") -> None:
        self._pb_utils = pb_utils
        self._final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._log = log
        self._queue: queue.SimpleQueue[Sequence[ResponseStream] | None] = queue.SimpleQueue()
        self.steps = StepCounter(name, lambda: not self._queue.empty())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Posts whose turn has not come."""
        return self._queue.qsize()

    def post(self, streams: Sequence[ResponseStream]) -> None:
        """Announce that these streams have something to send; never blocks. The sequence must not change later."""
        self._queue.put(streams)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what was posted, then end the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (streams := self._queue.get()) is not None:
            for stream in streams:
                if stream.response_sender is not None:
                    with self.steps.running():
                        self._send(stream, stream.response_sender)
            # No reference may live through the wait: Triton keeps a model alive while one of its senders lives.
            streams = stream = None  # type: ignore[assignment]

    def _send(self, stream: ResponseStream, response_sender: ResponseSender) -> None:
        try:
            answer = stream.next_response()
        except Exception as error:  # noqa: BLE001  without a last response the client would wait forever
            self._log(f"a response could not be made: {error}")
            answer = error_codes.error_response(self._pb_utils, error), True
        if answer is None:
            return
        response, last = answer
        try:
            response_sender.send(response, flags=self._final if last else 0)
        except Exception as error:  # noqa: BLE001  whatever Triton raises, the thread must continue
            self._log(f"a response could not be sent: {error}")
            stream.broken()
        if last:
            stream.response_sender = None
        try:
            stream.sent(last)
        except Exception as error:  # noqa: BLE001  the other streams still have responses to send
            self._log(f"the step after a response failed: {error}")


class Responder:
    """Answers the requests of a front and counts how they ended. Owns the sending threads.

    decoupled: whether Triton takes several responses for a request of this front; `execute` returns none then.
    steps: those of Triton's thread that executes, and of the sending threads.
    """

    def __init__(self, pb_utils: PbUtils, metrics: RequestMetrics, log: Log, decoupled: bool = False) -> None:
        self._pb_utils = pb_utils
        self._decoupled = decoupled
        self._metrics = metrics
        self._counting = threading.Lock()
        self._answers = ResponseThread(pb_utils, log)
        self._errors = ResponseThread(pb_utils, log, "errors")
        self._executing = StepCounter("execute", lambda: False)
        self.steps = [self._executing, self._answers.steps, self._errors.steps]
        self._unsent_bound = Bound("responses", _MAX_UNSENT, "answers", "wait to be sent")
        self._refusal_slots = threading.Semaphore(_MAX_REFUSALS)
        self.post = self._answers.post

    def close(self) -> None:
        """Send what was posted, then end the threads."""
        self._answers.close()
        self._errors.close()

    def start(self, requests: Sequence[InferenceRequest], submit: Submit) -> Returned:
        """Call `submit(request, its response sender)` for each; an error that it raises is that request's answer.

        `execute` must return what this returns. Blocks only while too many errors of a decoupled model wait to be sent.
        """
        returned = [self._start(request, submit) for request in requests]
        return None if all(response is None for response in returned) else returned

    def _start(self, request: InferenceRequest, submit: Submit) -> InferenceResponse | None:
        with self._executing.running():
            response_sender = request.get_response_sender()
            try:
                self._unsent_bound.require(self._answers.waiting)
                submit(request, response_sender)
            except Exception as error:  # noqa: BLE001  one bad request must not cost the others
                with_code = error_codes.is_forwarded(request)
                if not self._decoupled:
                    self.count(error_codes.code_name(error))
                    return self.error_response(error, with_code)
                self._refusal_slots.acquire()
                self.fail(response_sender, error, None, with_code, lambda _: self._refusal_slots.release())
        return None

    def send(
        self,
        response_sender: ResponseSender,
        make: Make,
        arrived: float,
        after: Callable[[str], None] | None = None,
        before: Callable[[], None] | None = None,
        code: str = "OK",
    ) -> None:
        """Answer with what `make` returns on the sending thread; never blocks.

        arrived: monotonic, in seconds. before: called on the sending thread before the response is made. after: called
        with the code, after it was sent and counted: `code`, or, where `make` raises, that of the error.
        """
        ended = partial(self._ended, arrived, after)
        self._answers.post([_Served(response_sender, _preceded(make, before), ended, code)])

    def fail(
        self,
        response_sender: ResponseSender,
        error: Exception,
        before: Callable[[], None] | None = None,
        with_code: bool = False,
        after: Callable[[str], None] | None = None,
    ) -> None:
        """Answer with `error`, ahead of the answers that wait to be sent; never blocks.

        before, after: as for `send`, on the thread that sends errors; with_code: see `error_codes.with_code`.
        """
        make = partial(self.error_response, error, with_code)
        ended = partial(self._ended, None, after, error_codes.code_name(error))
        self._errors.post([SingleResponse(response_sender, _preceded(make, before), ended)])

    def count(self, code: str, arrived: float | None = None) -> None:
        """Count a request that ended with this code, and its latency if it is OK and has `arrived`."""
        if arrived is not None and code == "OK":
            self._metrics.latency_ms.observe((time.monotonic() - arrived) * 1e3)
        with self._counting:
            self._metrics.answered[code].add()

    def error_response(self, error: Exception, with_code: bool) -> InferenceResponse:
        """See `error_codes.with_code`."""
        make = error_codes.with_code if with_code else error_codes.error_response
        return make(self._pb_utils, error)

    def _ended(self, arrived: float | None, after: Callable[[str], None] | None, code: str) -> None:
        self.count(code, arrived)
        if after is not None:
            after(code)


def _preceded(make: Make, before: Callable[[], None] | None) -> Make:
    return make if before is None else partial(_both, before, make)


def _both(before: Callable[[], None], make: Make) -> InferenceResponse:
    before()
    return make()


class _Watched(NamedTuple):
    since: float
    is_cancelled: Callable[[], bool]
    then: Callable[[], Any]


class CancellationWatch:
    """One thread that asks about each request that has waited `ask_after_s`, at most 64 of them a tenth of a second."""

    def __init__(
        self, log: Callable[[str], None], period_s: float = _ASK_PERIOD_S, ask_after_s: float = _ASK_AFTER_S
    ) -> None:
        # In the order in which they are asked about.
        self._watched: dict[Hashable, _Watched] = {}
        self._ask_after_s = ask_after_s
        self._asking = threading.Lock()
        self._log = log
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancellations", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, key: Hashable, is_cancelled: Callable[[], bool], then: Callable[[], Any]) -> None:
        """Call `then` once, on the watching thread, when `is_cancelled` returns True."""
        self._watched[key] = _Watched(time.monotonic(), is_cancelled, then)

    def remove(self, key: Hashable) -> None:
        """Stop watching a request. After this returns, `is_cancelled` is not called. Unknown keys are ignored."""
        with self._asking:
            self._watched.pop(key, None)

    def close(self, timeout_s: float = 3.0) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout_s)
        self._watched.clear()

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self._ask_about(islice(self._due(), _MOST_ASKED))

    def _due(self) -> Iterator[Hashable]:
        before = time.monotonic() - self._ask_after_s
        return (key for key, watched in list(self._watched.items()) if watched.since <= before)

    def _ask_about(self, keys: Iterator[Hashable]) -> None:
        # In a call of its own: a key holds its request, and with it Triton's sender, which must not outlive the answer.
        for key in keys:
            self._ask(key)

    def _ask(self, key: Hashable) -> None:
        try:
            with self._asking:
                watched = self._watched.pop(key, None)
                if watched is None:
                    return
                if not watched.is_cancelled():
                    # At the end: the others come first.
                    self._watched[key] = watched
                    return
            watched.then()
        except Exception as error:  # noqa: BLE001  one request must not end the watch of the others
            self._log(f"checking for a cancellation failed: {error}")
