"""Calls to the later levels, which are other models of the server; a model that failed is not called for a while.

They go over gRPC, as a client's: a call between models (BLS) cannot be taken back, and holds a thread of the server for
ever where the process of its callee dies (Triton 24.10).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shapeshift.cascade.policy.routing import Array, LevelOutput
from shapeshift.errors import (
    EngineError,
    InvalidInputError,
    ModelDiedError,
    ModelError,
    ModelGoneError,
    OverloadedError,
    ShapeshiftError,
    TimedOutError,
)
from shapeshift.loops import Failures
from shapeshift.serving.bounds import Bound, unloading
from shapeshift.serving.description import PLACEHOLDERS
from shapeshift.serving.metrics import Counter, Gauge
from shapeshift.serving.model_args import DESCRIPTION, Log
from shapeshift.triton.async_client import AsyncClient, ClientThread, ModelCall

ENGINE_MS = "ENGINE_MS"
_REFUSED = ("INVALID_ARG", "UNSUPPORTED")
# A level may let texts wait for half of it, its default `max_queue_ms`.
TIMEOUT_S = 60.0
# How long a model that failed is not called; each failure in a row doubles it, so many times.
_RETRY_S, _MAX_DOUBLINGS = 1.0, 4
_MIN_TIMEOUT_S, _POLL_S = 1e-3, 0.01
# While a level has calls to answer it is asked every period for a sign, which needs no engine and no queue. Half a
# minute without one is what the sidecar, too, takes for a hung process.
_SIGN_PERIOD_S, _SIGN_TIMEOUT_S, _MISSED_SIGNS = 1.0, 5.0, 6


class LevelGoneError(ShapeshiftError):
    """The level's model is not loaded, has died, gave no answer or no sign in time, or failed recently."""


@dataclass
class _Backoff:
    """Failures of a model in a row, when the first one was, and when the model may be called again."""

    failures: int = 0
    first_failure: float = 0.0
    retry_at: float = 0.0


@dataclass(frozen=True)
class LevelCall:
    """A call to a level for rows of one text or one pair.

    outputs: of LOGITS, IMPORTANCE, OFFSETS, EMBEDDING, ENGINE_MS; truncate: whether the model may cut the texts;
    deadline: of the request, monotonic seconds; checkpoint: the hash of the one that the model must have, which may be
    loaded again with another one at any time; empty for any; trace: as of `ModelCall`; slo_class: of the request.
    """

    model: str
    rows: Sequence[Sequence[bytes]]
    outputs: Sequence[str]
    truncate: bool = False
    deadline: float | None = None
    checkpoint: str = ""
    trace: str = ""
    slo_class: str = ""


class LevelResult(NamedTuple):
    """What a level computed of several rows. engine_ms: [rows]."""

    outputs: list[LevelOutput]
    engine_ms: Array


class LevelClient:
    """Calls models over gRPC; any thread may call `submit`. A call that is given up holds nothing of the server.

    most_calls: that run at once; timeout_s: of a call.
    """

    def __init__(
        self,
        client: AsyncClient,
        log: Log,
        most_calls: int,
        timeout_s: float = TIMEOUT_S,
        sign_period_s: float = _SIGN_PERIOD_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._client = client
        self._thread = ClientThread(client.close)
        self._failures = Failures(log, "a look for signs of the later levels")
        self._sign_period_s = sign_period_s
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._bound = Bound("queue_rows", most_calls, "calls", "run")
        self._lock = threading.Lock()
        self._backoffs: defaultdict[str, _Backoff] = defaultdict(_Backoff)
        self._in_flight, self._answered, self._failed, self._timeouts = 0, 0, 0, 0
        self._closing = False
        # Of the calls that the models are to answer.
        self._limits: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._thread.start(self._watch())

    @property
    def in_flight(self) -> int:
        """Calls that run."""
        return self._in_flight

    def metrics(self) -> list[Counter | Gauge]:
        """What is exported of the calls."""
        return [
            Counter("level_calls_total", "Calls to later levels that were answered", read=lambda: self._answered),
            Counter("level_failures_total", "Calls to later levels that failed", read=lambda: self._failed),
            Counter("level_timeouts_total", "Calls to later levels that timed out", read=lambda: self._timeouts),
            Gauge("level_calls_running", "Calls to later levels that run", lambda: self.in_flight),
        ]

    def submit(self, call: LevelCall, done: Callable[[LevelResult | Exception], None]) -> None:
        """Start a call; `done` is called once, on another thread.

        The error is LevelGoneError, InvalidInputError (the model refuses a text), OverloadedError (the model is full or
        has another checkpoint, or the deadline has passed), or EngineError (any other failure). Raises LevelGoneError
        where the model failed recently, OverloadedError where too many calls run or the deadline has passed; `done` is
        not called then.
        """
        now = time.monotonic()
        limit = now + self._timeout_s
        if call.deadline is not None and call.deadline <= now:
            raise OverloadedError(f"latency_ms ran out before model {call.model} was called; retry later")
        with self._lock:
            if self._closing:
                raise unloading()
            backoff = self._backoffs[call.model]
            if now < backoff.retry_at:
                seconds = f"in the last {now - backoff.first_failure:.1f} s"
                raise LevelGoneError(f"model {call.model} failed {backoff.failures} times {seconds}; retry later")
            self._bound.require(self._in_flight)
            self._in_flight += 1
            if backoff.failures:
                # This call alone finds out whether the model is back.
                backoff.retry_at = limit
        self._thread.start(self._serve(call, limit, done))

    def is_ready(self, model: str) -> bool:
        """Whether the model gives a sign; blocks until it does, or its time is over."""
        missed: list[int] = []

        async def probe() -> None:
            missed.append(await self._missed_signs(model))

        with contextlib.suppress(CancelledError):
            self._thread.start(probe()).result()
        return missed == [0]

    def close(self, timeout_s: float = 5.0) -> None:
        """Refuse further calls, and end what still runs after `timeout_s` with LevelGoneError."""
        with self._lock:
            self._closing = True
        end = time.monotonic() + timeout_s
        while self._in_flight and time.monotonic() < end:
            time.sleep(_POLL_S)
        self._thread.close()

    async def _serve(self, call: LevelCall, limit: float, done: Callable[[LevelResult | Exception], None]) -> None:
        """Call `done` by the deadline. The call goes on after its request's, to find out about the level."""
        running = asyncio.create_task(self._run(call, limit))
        left_s = None if call.deadline is None or call.deadline >= limit else call.deadline - time.monotonic()
        outcome: LevelResult | Exception
        try:
            await asyncio.wait([running], timeout=left_s)
            late = OverloadedError(f"latency_ms ran out before model {call.model} answered; retry later")
            outcome = running.result() if running.done() else late
        except asyncio.CancelledError:
            outcome = LevelGoneError(f"model {call.model}: no answer before this model was unloaded")
        done(outcome)

    async def _run(self, call: LevelCall, limit: float) -> LevelResult | Exception:
        """The outcome by `limit`, of which the level is judged."""
        outcome: LevelResult | Exception
        try:
            outcome = await self._ask(call, limit)
        except OverloadedError as error:
            outcome = error
        except TimeoutError:
            self._timeouts += 1
            outcome = LevelGoneError(f"model {call.model}: no answer in time")
        except (ModelGoneError, ModelDiedError) as error:
            outcome = LevelGoneError(str(error))
        except ModelError as error:
            outcome = _meaning(error)
        except Exception as error:  # noqa: BLE001  whatever happens, the rows get an answer
            outcome = error.with_traceback(None)
        finally:
            with self._lock:
                self._in_flight -= 1
        self._record(call.model, outcome)
        return outcome

    async def _ask(self, call: LevelCall, limit: float) -> LevelResult:
        inputs = {"TEXT": _column([texts[0] for texts in call.rows])}
        if len(call.rows[0]) > 1:
            inputs["TEXT_PAIR"] = _column([texts[1] for texts in call.rows])
        parameters: dict[str, bool | str] = {"truncate": True} if call.truncate else {}
        if call.checkpoint:
            parameters["checkpoint"] = call.checkpoint
        if call.slo_class:
            parameters["slo_class"] = call.slo_class
        timeout_s = max(_MIN_TIMEOUT_S, limit - time.monotonic())
        started = time.perf_counter()
        # gRPC has its own limit too, by which the server learns that nobody waits any more.
        async with asyncio.timeout(timeout_s) as timeout:
            self._limits[call.model].add(timeout)
            try:
                tensors = await self._client.infer(
                    ModelCall(call.model, inputs, 2 * timeout_s, call.outputs, parameters, trace=call.trace)
                )
            finally:
                self._limits[call.model].discard(timeout)
        if any(name not in tensors or len(tensors[name]) != len(call.rows) for name in call.outputs):
            raise EngineError(
                f"model {call.model} answered without {', '.join(call.outputs)} for {len(call.rows)} texts"
            )
        engine_ms = np.full(len(call.rows), (time.perf_counter() - started) * 1e3)
        if ENGINE_MS in tensors:
            engine_ms = tensors.pop(ENGINE_MS).reshape(-1)
        return LevelResult([_output(tensors, index) for index in range(len(call.rows))], engine_ms)

    async def _watch(self) -> None:
        """End the calls to a model that is gone or gives no sign; a slow one gives signs, however long its calls take.

        Triton (24.10) never answers what a dead process held.
        """
        missed: defaultdict[str, int] = defaultdict(int)
        while True:
            await asyncio.sleep(self._sign_period_s + self._failures.pause_s)
            with self._failures.caught():
                await self._look_for_signs(missed)

    async def _look_for_signs(self, missed: dict[str, int]) -> None:
        """missed: by model, the signs in a row that were not given."""
        waiting = {model: set(limits) for model, limits in self._limits.items() if limits}
        for model, more in zip(waiting, await asyncio.gather(*map(self._missed_signs, waiting)), strict=True):
            missed[model] = missed[model] + more if more else 0
            if missed[model] >= _MISSED_SIGNS:
                for limit in waiting[model] & self._limits[model]:
                    with contextlib.suppress(RuntimeError):
                        limit.reschedule(0.0)

    async def _missed_signs(self, model: str) -> int:
        try:
            await self._client.infer(ModelCall(model, PLACEHOLDERS[1], _SIGN_TIMEOUT_S, [DESCRIPTION.name]))
        except (ModelGoneError, ModelDiedError):
            return _MISSED_SIGNS
        except TimedOutError:
            return 1
        except Exception:  # noqa: BLE001  any other error is a sign
            return 0
        return 0

    def _record(self, model: str, outcome: LevelResult | Exception) -> None:
        with self._lock:
            failed = isinstance(outcome, Exception)
            self._answered += not failed
            self._failed += failed
            # A model that refuses a text, or is full, can be called.
            if not failed or isinstance(outcome, InvalidInputError | OverloadedError):
                self._backoffs[model] = _Backoff()
                return
            backoff, now = self._backoffs[model], time.monotonic()
            backoff.retry_at = now + self._retry_s * 2 ** min(backoff.failures, _MAX_DOUBLINGS)
            backoff.first_failure = backoff.first_failure if backoff.failures else now
            backoff.failures += 1


def _column(texts: Sequence[bytes]) -> Array:
    return np.array([[text] for text in texts], dtype=object)


def _output(tensors: dict[str, Array], index: int) -> LevelOutput:
    return LevelOutput(**{name.lower(): values[index] for name, values in tensors.items()})


def _meaning(error: ModelError) -> ShapeshiftError:
    if error.code in _REFUSED:
        return InvalidInputError("TEXT", str(error), "a text that the level accepts")
    return OverloadedError(str(error)) if error.code == "UNAVAILABLE" else EngineError(str(error))
