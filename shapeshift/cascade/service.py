"""One candidate in service: rows go from level to level until an answer is confident or no level is left.

The engines of the first level run in this process, so that an early answer needs no call.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from shapeshift.cascade.candidates import ServingCandidate
from shapeshift.cascade.level_client import ENGINE_MS, LevelCall, LevelClient
from shapeshift.cascade.policy.routing import Array
from shapeshift.cascade.request import ClassifyRequest, Control, LevelOutput, LevelResult, Row
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines import manifest
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.serving.model_args import Log
from shapeshift.serving.parameters import RequestParameters

# Longer than the first level lets texts wait by default.
_DRAIN_S = 60.0
_POLL_S = 0.02


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
        self.table, self.candidate = serving.table, serving.candidate
        self._control = Control(self.table, self.candidate)
        self._client = client
        self._random = random.Random(settings.seed)
        self._in_flight = 0
        self._in_flight_lock = threading.Lock()
        first, *later = self.candidate.levels
        for model in later:
            # A later level may belong to another backend; its files are not here then.
            if (engines / model / manifest.FILE_NAME).is_file():
                self.table.check_engines(engines / model, model, model == later[-1])
        self.engines = self.table.check_engines(engines / first, first, not later)
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
            request.begin(self._control_for(request.params), self._release)
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

    def _control_for(self, params: RequestParameters) -> Control:
        """The decisions for a request: of the same levels, the fastest candidate that assures `min_accuracy`."""
        num_levels, least = self._control.num_levels, params.min_accuracy
        if params.level is not None and not 1 <= params.level <= num_levels:
            raise InvalidInputError("parameter level", params.level, f"1 to {num_levels}")
        if least is None:
            return self._control
        same_levels = [one for one in self.table.candidates if one.levels == self.candidate.levels]
        accurate = [one for one in same_levels if one.assured_accuracy >= least]
        if not accurate:
            best = max(one.assured_accuracy for one in same_levels)
            allowed = f"at most {best:.4f}, the greatest lower bound of the accuracy of these levels' candidates"
            if self.candidate.accuracy_bound is None:
                allowed = "0 for a table without accuracy bounds; run `shapeshift cascade register` again"
            raise InvalidInputError("parameter min_accuracy", least, allowed)
        return Control(self.table, min(accurate, key=lambda one: (one.latency_ms, -one.accuracy, one.name)))

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
            self._on_result(request, request.rows, 1, result)

        left_ms = None if request.deadline is None else max(1e-3, (request.deadline - time.monotonic()) * 1e3)
        self.executor.submit(TextRequest(ids, finished, left_ms))

    def _call(self, request: ClassifyRequest, rows: Sequence[Row], level: int) -> None:
        """Have a later level compute some rows of a request."""
        model = self.table.model(self.candidate.levels[level - 1])
        call = LevelCall(
            model.name,
            [row.next_texts for row in rows],
            self._outputs(model.outputs, level),
            request.params.truncate,
            request.deadline,
            model.checkpoint_sha256,
        )
        on_result = partial(self._on_result, request, rows, level)
        try:
            self._client.submit(call, on_result)
        except Exception as error:  # noqa: BLE001  the rows keep the answer of an earlier level
            on_result(error)

    def _on_result(
        self, request: ClassifyRequest, rows: Sequence[Row], level: int, result: LevelResult | Exception
    ) -> None:
        try:
            if not isinstance(result, Exception) and not self._is_valid(result):
                model = self.candidate.levels[level - 1]
                result = EngineError(f"model {model}: LOGITS are not {len(self.table.labels)} finite numbers")
            if isinstance(result, Exception):
                self._fall_back(request, rows, result)
            else:
                self._step(request, rows, level, result)
        except Exception as error:  # noqa: BLE001  the thread that ran the level must continue
            request.fail(error)

    def _step(self, request: ClassifyRequest, rows: Sequence[Row], level: int, result: LevelResult) -> None:
        """Record what a level computed of some rows, decide which go on, and run the next level on those."""
        control, unsure = request.control, []
        for row, output, engine_ms in zip(rows, result.outputs, result.engine_ms, strict=True):
            started = time.perf_counter()
            row.record(*control.answer(level, output, row.ensemble))
            if request.params.level is None and self._random.random() < control.p_continue(level, output):
                row.next_texts, row.next_pruned = control.prune(row.texts, level, output)
                unsure.append(row)
            row.engine_ms += float(engine_ms)
            row.control_ms += (time.perf_counter() - started) * 1e3
        if unsure:
            self._call(request, unsure, level + 1)
        request.finish_rows(len(rows) - len(unsure))

    def _outputs(self, offered: Sequence[str], level: int) -> list[str]:
        """The outputs to ask a later level for."""
        names = ["LOGITS", ENGINE_MS]
        if level < self._control.num_levels:
            names += ["EMBEDDING"] if self.table.is_regression else []
            names += ["IMPORTANCE", "OFFSETS"] if {"IMPORTANCE", "OFFSETS"} <= set(offered) else []
        return [name for name in names if name in offered]

    def _is_valid(self, result: LevelResult) -> bool:
        shape = (len(self.table.labels),)
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
