"""One candidate in service: rows go from level to level until an answer is confident or no level is left."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from shapeshift.cascade.candidates.registry import ServingCandidate
from shapeshift.cascade.first_level import FirstLevel, check_engines
from shapeshift.cascade.level_client import ENGINE_MS, LevelClient
from shapeshift.cascade.metrics import CascadeMetrics
from shapeshift.cascade.policy.control import Control, LevelOutput
from shapeshift.cascade.request import ClassifyRequest, LevelResult, Row
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.engines.manifest import FILE_NAME as MANIFEST_FILE
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
        own: CascadeSettings,
        client: LevelClient,
        metrics: CascadeMetrics,
        log: Log,
        device: int | None = None,
    ) -> None:
        self.table, self.candidate = serving.table, serving.candidate
        self._control = Control(serving.table, serving.candidate)
        for level, model in enumerate(serving.candidate.levels):
            # A later level may belong to another backend; its files are not here then.
            if level and (engines / model / MANIFEST_FILE).is_file():
                check_engines(engines / model, serving.table, serving.candidate, level)
        self._client = client
        self._metrics = metrics
        self._random = random.Random(own.seed)
        self._random_lock = threading.Lock()
        self._in_flight = 0
        self._in_flight_lock = threading.Lock()
        self.first_level = FirstLevel(engines, serving.table, serving.candidate, own, log, device)

    def acquire(self) -> None:
        """Announce one `submit`: `close` waits for its request from now on."""
        with self._in_flight_lock:
            self._in_flight += 1

    def submit(self, request: ClassifyRequest) -> list[int]:
        """Start a request for rows of one text or one pair, after `acquire`.

        Returns the number of tokens of each row, none where the first level does not run. Raises InvalidInputError for
        an invalid text or parameter, OverloadedError where the queue is full; the request does not end then.
        """
        try:
            request.begin(self._control_for(request.given), self._release)
            return self._run(request, request.rows, request.level or 1)
        except Exception:
            self._release()
            raise

    def close(self) -> None:
        """Wait for the requests in flight, then stop the threads of the first level."""
        end = time.monotonic() + _DRAIN_S
        while self._in_flight and time.monotonic() < end:
            time.sleep(_POLL_S)
        self.first_level.executor.close()

    def _release(self) -> None:
        with self._in_flight_lock:
            self._in_flight -= 1

    def _control_for(self, given: RequestParameters) -> Control:
        """The decisions for a request: of the same levels, the fastest candidate that assures `min_accuracy`."""
        num_levels, least = self._control.num_levels, given.min_accuracy
        if given.level is not None and not 1 <= given.level <= num_levels:
            raise InvalidInputError("parameter level", given.level, f"1 to {num_levels}")
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

    def _run(self, request: ClassifyRequest, rows: Sequence[Row], level: int) -> list[int]:
        """Run a level on some rows of a request; the tokens of each where it is the first level."""
        texts = [row.next_texts for row in rows]
        on_result = partial(self._on_result, request, rows, level)
        if level == 1:
            return self.first_level.submit(texts, request.truncate, request.deadline, on_result)
        model = self.candidate.levels[level - 1]
        outputs, checkpoint = self._outputs(model, level), self.table.model(model).checkpoint_sha256
        try:
            self._client.submit(model, texts, outputs, request.truncate, request.deadline, on_result, checkpoint)
        except Exception as error:  # noqa: BLE001  the rows keep the answer of an earlier level
            on_result(error)
        return []

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
        unsure = []
        for row, output, engine_ms in zip(rows, result.outputs, result.engine_ms, strict=True):
            started = time.perf_counter()
            self._record(request, row, level, output)
            if self._goes_on(request, row, level, output):
                row.go_on(request.control.prune(row.texts, level, output))
                unsure.append(row)
            row.engine_ms += float(engine_ms)
            row.control_ms += (time.perf_counter() - started) * 1e3
        if unsure:
            self._run(request, unsure, level + 1)
        request.finish_rows(len(rows) - len(unsure))

    def _record(self, request: ClassifyRequest, row: Row, level: int, output: LevelOutput) -> None:
        row.record(*request.control.answer(level, output, row.ensemble))
        if level == 1 and output.offsets is not None:
            row.num_tokens = len(output.offsets)
        if level == 1 and request.level is None:
            self._metrics.observe_confidence(row.final.confidence)

    def _goes_on(self, request: ClassifyRequest, row: Row, level: int, output: LevelOutput) -> bool:
        if request.level is not None:
            return False
        probability = request.control.p_continue(level, output)
        if probability <= 0 or probability >= 1:
            return probability >= 1
        with self._random_lock:
            return self._random.random() < probability

    def _outputs(self, model: str, level: int) -> list[str]:
        """The outputs to ask a later level for."""
        offered = self.table.model(model).outputs
        wanted = ["LOGITS", ENGINE_MS]
        if level < self._control.num_levels:
            wanted += ["EMBEDDING"] if self.table.is_regression else []
            wanted += ["IMPORTANCE", "OFFSETS"] if {"IMPORTANCE", "OFFSETS"} <= set(offered) else []
        return [name for name in wanted if name in offered]

    def _is_valid(self, result: LevelResult) -> bool:
        shape = (len(self.table.labels),)
        return all(one.logits.shape == shape and bool(np.isfinite(one.logits).all()) for one in result.outputs)

    def _fall_back(self, request: ClassifyRequest, rows: Sequence[Row], error: Exception) -> None:
        """Let the rows keep the answer of an earlier level; without one the request fails."""
        if any(row.answer is None for row in rows):
            request.fail(error)
            return
        self._metrics.count_fallbacks(len(rows))
        request.finish_rows(len(rows))
