"""Calls to the later levels, which are other models of the server; a model that failed is not called for a while."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shapeshift.cascade.policy.control import LevelOutput
from shapeshift.cascade.policy.routing import Array
from shapeshift.cascade.request import LevelResult
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.errors import (
    EngineError,
    InvalidInputError,
    ModelDiedError,
    ModelError,
    ModelGoneError,
    OverloadedError,
    ShapeshiftError,
)
from shapeshift.serving import bls
from shapeshift.serving.bounds import Bound
from shapeshift.serving.call_pool import CallPool, CallTimeoutError
from shapeshift.serving.metrics import Counter, Gauge

ENGINE_MS = "ENGINE_MS"
_REFUSED = ("INVALID_ARG", "UNSUPPORTED")
# The wait for a model that keeps failing doubles so many times.
_MAX_DOUBLINGS = 4
# A model that never answers may hold so many threads.
_MAX_ABANDONED = 64
_PROBE_TEXT = b"a"


class LevelGoneError(ShapeshiftError):
    """The level's model is not loaded, has died, gave no answer in time, or failed recently."""


@dataclass
class _Backoff:
    """Failures of a model in a row, when the first one was, and when the model may be called again."""

    failures: int = 0
    first_failure: float = 0.0
    retry_at: float = 0.0


class LevelClient:
    """Calls models on its own threads; any thread may call `submit`."""

    def __init__(self, pb_utils: Any, own: CascadeSettings) -> None:
        self._pb_utils = pb_utils
        self._timeout_s = own.call_timeout_ms / 1e3
        self._retry_s = own.retry_ms / 1e3
        self._bound = Bound("queue_calls", own.queue_calls, "calls")
        self._pool = CallPool("level-call", own.call_threads, max_abandoned=_MAX_ABANDONED)
        self._lock = threading.Lock()
        self._backoffs: defaultdict[str, _Backoff] = defaultdict(_Backoff)
        self._answered, self._failed = 0, 0

    @property
    def in_flight(self) -> int:
        """Calls that wait or run."""
        return self._pool.waiting + self._pool.running

    def metrics(self) -> list[Counter | Gauge]:
        """What is exported of the calls."""
        return [
            Counter("level_calls_total", "Calls to later levels that were answered", read=lambda: self._answered),
            Counter("level_failures_total", "Calls to later levels that failed", read=lambda: self._failed),
            Counter("level_timeouts_total", "Calls to later levels that timed out", read=lambda: self._pool.timeouts),
            Gauge("level_calls_running", "Calls to later levels that wait or run", lambda: self.in_flight),
        ]

    def submit(
        self,
        model: str,
        rows: Sequence[Sequence[bytes]],
        outputs: Sequence[str],
        truncate: bool,
        deadline: float | None,
        done: Callable[[LevelResult | Exception], None],
    ) -> None:
        """Ask `model` for `outputs` of rows of one text or one pair; `done` is called once, on another thread.

        outputs: of LOGITS, IMPORTANCE, OFFSETS, EMBEDDING, ENGINE_MS; truncate: whether the model may cut the texts;
        deadline: of the request, monotonic seconds. The error is LevelGoneError, InvalidInputError (the model refuses a
        text), OverloadedError (the model is full, or the deadline has passed), or EngineError (any other failure).
        Raises LevelGoneError where the model failed recently, OverloadedError where too many calls wait; `done` is not
        called then.
        """
        now, started = time.monotonic(), time.perf_counter()
        timeout = now + self._timeout_s
        end = timeout if deadline is None else min(timeout, deadline)

        def finished(outcome: LevelResult | Exception) -> None:
            if isinstance(outcome, CallTimeoutError):
                if not outcome.started:
                    done(OverloadedError(f"the call to model {model} was not started in time; retry later"))
                    return
                # A level that misses only the request's own deadline has not failed.
                if end < timeout and time.monotonic() > end:
                    # Nor has it answered: what is known of the level stays.
                    done(OverloadedError(f"latency_ms ran out before model {model} answered; retry later"))
                    return
                outcome = LevelGoneError(f"model {outcome}")
            self._record(model, outcome)
            done(outcome)

        with self._lock:
            backoff = self._backoffs[model]
            self._require_callable(model, backoff, now)
            self._bound.require(self._pool.waiting)
            self._pool.submit(model, lambda: self._call(model, rows, outputs, truncate, started), finished, end)
            if backoff.failures:
                # This call alone finds out whether the model is back.
                backoff.retry_at = end

    def is_ready(self, model: str, pairs: bool) -> bool:
        """Whether the model answers a call, even with an error; blocks until it does."""
        try:
            self._call(model, [[_PROBE_TEXT] * (1 + pairs)], ["LOGITS"], False, time.perf_counter())
        except LevelGoneError:
            return False
        except Exception:  # noqa: BLE001  a model that refuses the call is loaded
            return True
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Refuse what waits, and end what still runs after `timeout_s` with LevelGoneError."""
        self._pool.close(timeout_s)

    def _require_callable(self, model: str, backoff: _Backoff, now: float) -> None:
        if now < backoff.retry_at:
            seconds = f"in the last {now - backoff.first_failure:.1f} s"
            raise LevelGoneError(f"model {model} failed {backoff.failures} times {seconds}; retry later")
        abandoned = self._pool.abandoned(model)
        if abandoned >= _MAX_ABANDONED:
            raise LevelGoneError(f"model {model} has not answered {abandoned} calls; retry later")

    def _call(
        self, model: str, rows: Sequence[Sequence[bytes]], outputs: Sequence[str], truncate: bool, started: float
    ) -> LevelResult:
        inputs = {"TEXT": _column([texts[0] for texts in rows])}
        if len(rows[0]) > 1:
            inputs["TEXT_PAIR"] = _column([texts[1] for texts in rows])
        try:
            found = bls.call(self._pb_utils, model, inputs, outputs, {"truncate": True} if truncate else None)
        except (ModelGoneError, ModelDiedError) as error:
            raise LevelGoneError(str(error)) from None
        except ModelError as error:
            raise _own_error(error) from None
        if any(name not in found or len(found[name]) != len(rows) for name in outputs):
            raise EngineError(f"model {model} answered without {', '.join(outputs)} for {len(rows)} texts")
        engine_ms = np.full(len(rows), (time.perf_counter() - started) * 1e3)
        if ENGINE_MS in found:
            engine_ms = found.pop(ENGINE_MS).reshape(-1)
        return LevelResult([_output(found, index) for index in range(len(rows))], engine_ms)

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


def _output(found: dict[str, Array], index: int) -> LevelOutput:
    return LevelOutput(**{name.lower(): values[index] for name, values in found.items()})


def _own_error(error: ModelError) -> ShapeshiftError:
    if error.code in _REFUSED:
        return InvalidInputError("TEXT", str(error), "a text that the level accepts")
    return OverloadedError(str(error)) if error.code == "UNAVAILABLE" else EngineError(str(error))
