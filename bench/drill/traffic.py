"""Open-loop load of all fronts at once. Every answer is checked; each request leaves one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from bench.drill.outcomes import CODED, LOST, RIGHT, WRONG, Outcome, kind_of_error, kind_of_refusal
from bench.drill.questions import Judge, Question, Tensors
from client.open_loop import INFER
from shapeshift.triton.async_client import is_last, tensors_of
from shapeshift.workloads.arrivals import poisson

TIMEOUT_S = 20.0
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 500)]
_BLOCK_S = 5.0


class Traffic:
    """Sends the questions of each front, at Poisson arrivals, to the server at `url`. It runs on a thread of its own.

    outcomes: of all requests so far, in the order of their ends. A context manager.
    """

    def __init__(self, url: str, questions: Mapping[str, Sequence[Question]], judge: Judge, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self.rates: dict[str, float] = {}
        self._url, self._questions, self._judge = url, questions, judge
        self._seeds = np.random.SeedSequence(seed)
        # By task: the front, and the intended instant.
        self._open: dict[asyncio.Task[Outcome], tuple[str, float]] = {}
        self._senders: list[Future[None]] = []
        self._channels: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
        self.run(self._close(), 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def run(self, task: Coroutine[Any, Any, Any], timeout_s: float = 600.0) -> Any:
        """Run `task` on the thread of the traffic, and return its result."""
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(timeout_s)

    def pending(self) -> list[Outcome]:
        """The requests without an outcome, as if they were lost."""
        return [Outcome(front, LOST, at_s, at_s, math.inf) for front, at_s in list(self._open.values())]

    def ask(self, question: Question) -> None:
        """Send one more request, now; its outcome is `extra`."""
        self._loop.call_soon_threadsafe(self._post, question, time.monotonic(), True)

    def resume(self, rates: Mapping[str, float]) -> None:
        """Send so many requests a second to each front, from now on."""
        self.pause()
        self.rates = dict(rates)
        self._senders = [
            asyncio.run_coroutine_threadsafe(self._send(front, rate, np.random.default_rng(seed)), self._loop)
            for (front, rate), seed in zip(self.rates.items(), self._seeds.spawn(len(rates)), strict=True)
        ]

    def pause(self) -> None:
        """Send no more; return when every request has its outcome."""
        for sender in self._senders:
            sender.cancel()
        self._senders = []
        while self._open:
            time.sleep(0.02)

    @contextlib.contextmanager
    def burst(self, rates: Mapping[str, float], seed: int) -> Iterator[None]:
        """Within the block, so many more requests a second; their outcomes are `extra`."""
        seeds = np.random.SeedSequence(seed).spawn(len(rates))
        senders = [
            asyncio.run_coroutine_threadsafe(self._send(front, rate, np.random.default_rng(one), True), self._loop)
            for (front, rate), one in zip(rates.items(), seeds, strict=True)
        ]
        try:
            yield
        finally:
            for sender in senders:
                sender.cancel()

    def learn(self) -> dict[str, int]:
        """Ask every question alone and keep the answers; drops those whose variants disagree.

        Returns the number of questions left, by front. Raises AssertionError for a front without any.
        """
        left = {}
        for front, questions in self._questions.items():
            agreeing = [question for question in questions if self.run(self.learn_one(question))]
            assert agreeing, f"no question of {front} has one answer"
            questions[:] = agreeing  # type: ignore[index]
            left[front] = len(agreeing)
        return left

    def carried(self, in_flight: int, duration_s: float) -> dict[str, float]:
        """Right answers a second of each front while `in_flight` requests of every front are open all the time."""
        return dict(self.run(self._carried(in_flight, duration_s)))

    def channel(self, front: str) -> Any:
        """The connection for a front. Only for tasks on the thread of the traffic."""
        if front not in self._channels:
            # A connection of its own: gRPC shares those with the same options.
            options = [*_OPTIONS, ("shapeshift.front", front)]
            self._channels[front] = grpc.aio.insecure_channel(self._url, options=options)
        return self._channels[front]

    async def stream(self, front: str, payload: bytes, timeout_s: float) -> Any:
        """The open stream of one request to a front that streams."""
        open_stream = self.channel(front).stream_stream(
            _STREAM, response_deserializer=service_pb2.ModelStreamInferResponse.FromString
        )
        # Without the header `triton_grpc_error`, which makes Triton 24.10 crash: see docs/drill.md.
        call = open_stream(timeout=timeout_s)
        await call.write(payload)
        await call.done_writing()
        return call

    async def _carried(self, in_flight: int, duration_s: float) -> dict[str, float]:
        counts: Counter[str] = Counter()
        end = time.monotonic() + duration_s

        async def ask_on(front: str, first: int) -> None:
            number = first
            while time.monotonic() < end:
                questions = self._questions[front]
                outcome = await self._ask(questions[number % len(questions)], time.monotonic(), extra=True)
                counts[front] += outcome.kind == RIGHT
                number += 1

        await asyncio.gather(*(ask_on(front, number) for front in self._questions for number in range(in_flight)))
        return {front: counts[front] / duration_s for front in self._questions}

    async def learn_one(self, question: Question) -> bool:
        """Ask one question and its variants alone and keep the answer; whether all agree."""
        question.right = await self._answer(question.front, question.payload, question.streams)
        for variant in question.variants:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await self._answer(question.front, variant, question.streams)
                if not is_evicted(answer) and not self._judge.accepts(question, answer):
                    return False
        return True

    async def _send(self, front: str, rate: float, rng: np.random.Generator, extra: bool = False) -> None:
        start = time.monotonic()
        while True:
            for instant in (start + poisson(rate, _BLOCK_S, rng)).tolist():
                await asyncio.sleep(max(0.0, instant - time.monotonic()))
                questions = self._questions[front]
                question = questions[int(rng.integers(len(questions)))]
                self._post(question, instant, extra)
            start += _BLOCK_S

    def _post(self, question: Question, instant: float, extra: bool) -> None:
        task = self._loop.create_task(self._ask(question, instant, extra))
        self._open[task] = question.front, instant
        task.add_done_callback(self._record)

    def _record(self, task: asyncio.Task[Outcome]) -> None:
        self._open.pop(task, None)
        if not task.cancelled():
            self.outcomes.append(task.result())

    async def _ask(self, question: Question, intended_s: float, extra: bool = False) -> Outcome:
        sent_s = time.monotonic()
        try:
            answer = await self._answer(question.front, question.payload, question.streams)
            if self._judge.accepts(question, answer):
                kind, text = RIGHT, ""
            else:
                # An image that could not meet its deadline is refused by its outcome, without a label.
                kind, text = CODED if is_evicted(answer) else WRONG, _short(answer)
        except EndedEarlyError as error:
            kind, text = LOST, str(error)
        except RefusedError as error:
            kind, text = kind_of_refusal(str(error)), str(error)
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
            kind = kind_of_error(error.code().name, error.details() or "", time.monotonic() - sent_s, TIMEOUT_S)
        except asyncio.CancelledError:
            # gRPC cancels a call whose request it could not send.
            kind, text = CODED, "CANCELLED: the request was not sent"
        return Outcome(question.front, kind, intended_s, sent_s, time.monotonic(), text, extra)

    async def _answer(self, front: str, payload: bytes, streams: bool) -> Tensors:
        if not streams:
            call = self.channel(front).unary_unary(
                INFER, response_deserializer=service_pb2.ModelInferResponse.FromString
            )
            return tensors_of(await call(payload, timeout=TIMEOUT_S))
        pieces: list[bytes] = []
        final = False
        async for response in await self.stream(front, payload, TIMEOUT_S):
            if response.error_message:
                raise RefusedError(response.error_message)
            tensors = tensors_of(response.infer_response)
            pieces += [piece for values in tensors.values() for piece in values.ravel().tolist()]
            final = is_last(response.infer_response)
        if not final:
            raise EndedEarlyError(f"the stream ended after {len(pieces)} pieces without its last response")
        return {"text_output": np.array([b"".join(pieces)], dtype=object)}

    async def _close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def is_evicted(answer: Tensors) -> bool:
    """Whether the answer is that for an image which did not run, since it could not meet its deadline."""
    return "LABEL" in answer and answer["LABEL"].ravel()[0] == b""


class RefusedError(Exception):
    """An error as a message of a stream, which has no code."""


class EndedEarlyError(Exception):
    """A stream without its last response."""


def _short(answer: Tensors) -> str:
    text = str({name: values.ravel()[:4].tolist() for name, values in answer.items()})
    return text if len(text) <= 120 else text[:119] + "…"
