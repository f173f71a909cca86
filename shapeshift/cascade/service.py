"""One candidate in service: the rows of a request go from level to level until an answer is confident or no level is
left.

The engines of the first level run in this process, so that an early answer needs no call.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from shapeshift.cascade.candidates import ServingCandidate
from shapeshift.cascade.level_client import ENGINE_MS, LevelCall, LevelClient, LevelResult
from shapeshift.cascade.policy.routing import Answer, Array, LevelOutput
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines import manifest
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.serving.front import Client
from shapeshift.serving.model_args import Log
from shapeshift.serving.parameters import RequestParameters

# Longer than the first level lets texts wait by default.
_DRAIN_S = 60.0
_POLL_S = 0.02


@dataclass(eq=False, slots=True)
class Row:
    """One text, or one pair of texts, of a request.

    texts, next_texts: what the last level that answered has read, and what the next one reads; next_pruned: words that
    it does not read; words_pruned: those that levels which have answered did not read; answer: the one so far, and the
    ensemble that the next level's output is added to; confidence: the first level's; num_tokens: that it has read;
    fell_back: whether a level failed, and the answer is that of an earlier one.
    """

    texts: list[bytes]
    next_texts: list[bytes]
    next_pruned: int = 0
    words_pruned: int = 0
    answer: Answer | None = None
    ensemble: Array | None = None
    confidence: float | None = None
    num_tokens: int = 0
    fell_back: bool = False
    engine_ms: float = 0.0
    control_ms: float = 0.0

    def record(self, answer: Answer, ensemble: Array) -> None:
        """Replace the answer: a level has answered `next_texts`."""
        self.answer, self.ensemble = answer, ensemble
        if answer.level == 1:
            self.confidence = answer.confidence
        self.texts = self.next_texts
        self.words_pruned += self.next_pruned
        self.next_pruned = 0

    @property
    def final(self) -> Answer:
        """The answer of a finished row."""
        assert self.answer is not None
        return self.answer


class ClassifyRequest:
    """The rows of a request. Calls done(request) once: when all rows are finished, or when `error` is set.

    client: who gets the answer, and `outputs` of it. serving: the candidate that serves it, which `begin` sets.
    deadline: monotonic seconds, None for none.
    """

    serving: ServingCandidate

    def __init__(
        self,
        client: Client,
        texts: Sequence[Sequence[bytes]],
        outputs: Sequence[str],
        params: RequestParameters,
        done: Callable[[ClassifyRequest], None],
    ) -> None:
        self.client = client
        self.outputs = outputs
        self.rows = [Row(list(row), list(row)) for row in texts]
        self.params = params
        self.arrived = time.monotonic()
        self.deadline = None if params.latency_ms is None else self.arrived + params.latency_ms / 1e3
        self.error: Exception | None = None
        self._done = done
        self._release: Callable[[], object] = bool
        self._unfinished = len(self.rows)
        self._lock = threading.Lock()

    def begin(self, serving: ServingCandidate, release: Callable[[], None]) -> None:
        """A candidate serves it from now on. release: called when it has ended."""
        self.serving = serving
        self._release = release

    def finish_rows(self, count: int) -> None:
        """Count further rows whose answer is final."""
        with self._lock:
            if not self._unfinished or not count:
                return
            self._unfinished -= count
            is_last = self._unfinished == 0
        if is_last:
            self._end()

    def fail(self, error: Exception) -> None:
        """End the request with `error`, unless it has ended."""
        with self._lock:
            if not self._unfinished:
                return
            self._unfinished = 0
            self.error = error
        self._end()

    def _end(self) -> None:
        self._release()
        self._done(self)


class CascadeService:
    """Serves requests with one candidate.

    A step of a request records what a level computed, decides which rows go on, and runs the next level on those. It
    runs on the thread that ran the level: an engine thread, or a thread of the client.
    """

    def __init__(
        self,
        serving: ServingCandidate,
        engines: Path,
        settings: CascadeSettings,
        client: LevelClient,
        log: Log,
        device: int | None = None,
    ) -> None:
        self.serving = serving
        self._table, self._levels = serving.table, serving.candidate.levels
        self._client = client
        # Of Eq. 4; equal draws after each load.
        self._random = random.Random(0)
        self._in_flight = 0
        self._in_flight_lock = threading.Lock()
        first, *later = self._levels
        for model in later:
            # A later level may belong to another backend; its files are not here then.
            if (engines / model / manifest.FILE_NAME).is_file():
                self._table.check_engines(engines / model, model, model == later[-1])
        self.engines = self._table.check_engines(engines / first, first, not later)
        self.manifest_sha256 = manifest.sha256(engines / first)
        self._tokenizer = TextTokenizer(
            engines / first / FILE_NAME,
            self.engines.max_tokens,
            type_stride=self.engines.type_stride,
            vocab_size=self.engines.vocabulary,
        )
        self.executor = EngineExecutor(self.engines, engines / first, settings, log, device)

    def acquire(self) -> None:
        """Announce one `submit`: `close` waits for its request from now on."""
        with self._in_flight_lock:
            self._in_flight += 1

    def submit(self, request: ClassifyRequest) -> None:
        """Start a request for rows of one text or one pair, after `acquire`.

        Raises InvalidInputError for an invalid text or parameter, OverloadedError where the queue is full; the request
        does not end then.
        """
        try:
            request.begin(self._serving_for(request.params), self._release)
            if (request.params.level or 1) == 1:
                self._run_here(request)
            else:
                self._call(request, request.rows, request.params.level or 1)
        except Exception:
            self._release()
            raise

    def close(self) -> None:
        """Wait for the requests in flight, then stop the threads of the first level."""
        end = time.monotonic() + _DRAIN_S
        while self._in_flight and time.monotonic() < end:
            time.sleep(_POLL_S)
        self.executor.close()

    def _release(self) -> None:
        with self._in_flight_lock:
            self._in_flight -= 1

    def _serving_for(self, params: RequestParameters) -> ServingCandidate:
        """What decides for a request: of the same levels, the fastest candidate that assures `min_accuracy`."""
        num_levels, least = self.serving.num_levels, params.min_accuracy
        if params.level is not None and not 1 <= params.level <= num_levels:
            raise InvalidInputError("parameter level", params.level, f"1 to {num_levels}")
        if least is None:
            return self.serving
        same_levels = [one for one in self._table.candidates if one.levels == self._levels]
        accurate = [one for one in same_levels if one.assured_accuracy >= least]
        if not accurate:
            best = max(one.assured_accuracy for one in same_levels)
            allowed = f"at most {best:.4f}, the greatest lower bound of the accuracy of these levels' candidates"
            if self.serving.candidate.accuracy_bound is None:
                allowed = "0 for a table without accuracy bounds; run `shapeshift cascade register` again"
            raise InvalidInputError("parameter min_accuracy", least, allowed)
        fastest = min(accurate, key=lambda one: (one.latency_ms, -one.accuracy, one.name))
        return replace(self.serving, candidate=fastest)

    def _run_here(self, request: ClassifyRequest) -> None:
        """Have the first level compute all rows. Raises as `submit` does."""
        prompt = self.engines.prompt(None)
        ids, offsets = [], []
        for index, row in enumerate(request.rows):
            pair = row.texts[1] if len(row.texts) > 1 else None
            text = self._tokenizer.encode_with_offsets(row.texts[0], pair, index, request.params.truncate, prompt)
            row.num_tokens = len(text.ids)
            ids.append(text.ids)
            offsets.append(text.offsets)

        def finished(computed: TextRequest) -> None:
            try:
                result: LevelResult | Exception = computed.error or _result(computed, offsets)
            except Exception as error:  # noqa: BLE001  the engine thread must continue
                result = error
            self._on_result(request, request.rows, 1, request.arrived, result)

        left_ms = None if request.deadline is None else max(1e-3, (request.deadline - time.monotonic()) * 1e3)
        self.executor.submit(TextRequest(ids, finished, left_ms, request.params.slo_class))

    def _call(self, request: ClassifyRequest, rows: Sequence[Row], level: int) -> None:
        """Have a later level compute some rows of a request."""
        model = self._table.model(self._levels[level - 1])
        call = LevelCall(
            model.name,
            [row.next_texts for row in rows],
            self._outputs(model.outputs, level),
            request.params.truncate,
            request.deadline,
            model.checkpoint_sha256,
            "" if request.client.trace is None else request.client.trace.header,
            request.params.slo_class or "",
        )
        on_result = partial(self._on_result, request, rows, level, time.monotonic())
        try:
            self._client.submit(call, on_result)
        except Exception as error:  # noqa: BLE001  the rows keep the answer of an earlier level
            on_result(error)

    def _on_result(
        self, request: ClassifyRequest, rows: Sequence[Row], level: int, began: float, result: LevelResult | Exception
    ) -> None:
        """began: when the rows were given to the level; monotonic, in seconds."""
        if (trace := request.client.trace) is not None:
            facts = {"texts": len(rows), "failed": isinstance(result, Exception)}
            trace.span(f"level {level}", began, time.monotonic(), facts)
        try:
            if not isinstance(result, Exception) and not self._is_valid(result):
                model = self._levels[level - 1]
                result = EngineError(f"model {model}: LOGITS are not {len(self._table.labels)} finite numbers")
            if isinstance(result, Exception):
                self._fall_back(request, rows, result)
            else:
                self._step(request, rows, level, result)
        except Exception as error:  # noqa: BLE001  the thread that ran the level must continue
            request.fail(error)

    def _step(self, request: ClassifyRequest, rows: Sequence[Row], level: int, result: LevelResult) -> None:
        """Record what a level computed of some rows, decide which go on, and run the next level on those."""
        serving, unsure = request.serving, []
        for row, output, engine_ms in zip(rows, result.outputs, result.engine_ms, strict=True):
            started = time.perf_counter()
            row.record(*serving.answer(level, output, row.ensemble))
            if request.params.level is None and self._random.random() < serving.p_continue(level, output):
                row.next_texts, row.next_pruned = serving.prune(row.texts, level, output)
                unsure.append(row)
            row.engine_ms += float(engine_ms)
            row.control_ms += (time.perf_counter() - started) * 1e3
        if unsure:
            self._call(request, unsure, level + 1)
        request.finish_rows(len(rows) - len(unsure))

    def _outputs(self, offered: Sequence[str], level: int) -> list[str]:
        """The outputs to ask a later level for."""
        names = ["LOGITS", ENGINE_MS]
        if level < self.serving.num_levels:
            names += ["EMBEDDING"] if self._table.is_regression else []
            names += ["IMPORTANCE", "OFFSETS"] if {"IMPORTANCE", "OFFSETS"} <= set(offered) else []
        return [name for name in names if name in offered]

    def _is_valid(self, result: LevelResult) -> bool:
        shape = (len(self._table.labels),)
        return all(one.logits.shape == shape and bool(np.isfinite(one.logits).all()) for one in result.outputs)

    def _fall_back(self, request: ClassifyRequest, rows: Sequence[Row], error: Exception) -> None:
        """Let the rows keep the answer of an earlier level; without one the request fails."""
        if any(row.answer is None for row in rows):
            request.fail(error)
            return
        for row in rows:
            row.fell_back = True
        request.finish_rows(len(rows))


def _result(computed: TextRequest, offsets: Sequence[Array]) -> LevelResult:
    def of_row(name: str, index: int, length: int | None = None) -> Array | None:
        values = computed.outputs.get(name)
        return None if values is None else values[index][:length]

    outputs = [
        LevelOutput(
            computed.outputs["LOGITS"][index], of_row("IMPORTANCE", index, len(one)), one, of_row("EMBEDDING", index)
        )
        for index, one in enumerate(offsets)
    ]
    return LevelResult(outputs, computed.engine_ms)
