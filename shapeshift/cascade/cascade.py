"""One candidate at work: rows go from level to level until one is sure enough, or there is none."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from shapeshift.cascade.calls import CallPool, Outcome
from shapeshift.cascade.control import Control, Level
from shapeshift.cascade.first_level import FirstLevel, checked
from shapeshift.cascade.levels import ENGINE_MS, LevelClient
from shapeshift.cascade.meters import CascadeMeters
from shapeshift.cascade.query import Query
from shapeshift.cascade.registry import Chosen
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.cascade.softmax import Array
from shapeshift.engines.manifest import FILE_NAME as MANIFEST_FILE
from shapeshift.engines.request import TextRequest
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.serving.log import Log
from shapeshift.serving.text_inputs import Offsets

_DRAIN_S = 10.0
_LOOK_S = 0.02


class Cascade:
    """Takes queries and finishes them on threads of its own."""

    def __init__(
        self,
        chosen: Chosen,
        engines: Path,
        own: CascadeSettings,
        client: LevelClient,
        calls: CallPool,
        meters: CascadeMeters,
        log: Log,
    ) -> None:
        self.table, self.candidate = chosen.table, chosen.candidate
        self.control = Control(chosen.table, chosen.candidate)
        for level, model in enumerate(chosen.candidate.levels):
            # A later level may live in another backend, whose files we cannot see.
            if level and (engines / model / MANIFEST_FILE).is_file():
                checked(engines / model, chosen.table, chosen.candidate, level)
        self._client = client
        self._calls = calls
        self._meters = meters
        self._random = random.Random(own.seed)
        self._drawing = threading.Lock()
        self._users = 0
        self._counting = threading.Lock()
        self.first = FirstLevel(engines, chosen.table, chosen.candidate, own, log)

    def enter(self) -> None:
        """A query is about to be submitted: `close` waits until it has left."""
        with self._counting:
            self._users += 1

    def leave(self) -> None:
        """A query has ended, or was not submitted."""
        with self._counting:
            self._users -= 1

    def control_for(self, min_accuracy: float | None) -> Control:
        """The decisions for a query that wishes for an accuracy: the fastest candidate of the same levels that has it.

        Raises InvalidInputError with the best there is where none has.
        """
        if min_accuracy is None:
            return self.control
        same = [one for one in self.table.candidates if one.levels == self.candidate.levels]
        good = [one for one in same if one.accuracy >= min_accuracy]
        if not good:
            best = max(one.accuracy for one in same)
            raise InvalidInputError("parameter min_accuracy", min_accuracy, f"at most {best:.4f}, the best candidate's")
        fastest = min(good, key=lambda one: (one.latency_ms, -one.accuracy, one.name))
        return Control(self.table, fastest)

    def check_level(self, level: int | None) -> None:
        """Raise InvalidInputError for a level that the candidate does not have."""
        if level is not None and not 1 <= level <= self.control.levels:
            raise InvalidInputError("parameter level", level, f"1 to {self.control.levels}")

    def submit(self, query: Query) -> list[int]:
        """Take the rows of `query`; how many tokens of the first level each has, none where it is not asked.

        Raises InvalidInputError for a text that it cannot take, OverloadedError where too many wait.
        """
        if query.level is not None and query.level > 1:
            self._ask(query, range(len(query.rows)), query.level)
            return []
        encoded = [self.first.encode(row.texts, number, query.truncate) for number, row in enumerate(query.rows)]
        offsets = [one.offsets for one in encoded]

        def first(request: TextRequest) -> None:
            self._first(query, offsets, request)

        patience = None if query.deadline is None else max(1e-3, (query.deadline - time.monotonic()) * 1e3)
        self.first.pool.submit(TextRequest([one.ids for one in encoded], first, patience))
        return [len(one.ids) for one in encoded]

    def close(self) -> None:
        """Let what is under way end, then stop the first level's threads."""
        end = time.monotonic() + _DRAIN_S
        while self._users and time.monotonic() < end:
            time.sleep(_LOOK_S)
        self.first.pool.close()

    def _first(self, query: Query, offsets: Sequence[Offsets], request: TextRequest) -> None:
        if request.error is not None:
            query.fail(request.error)
            return
        try:
            found = [
                Level(
                    request.outputs["LOGITS"][index],
                    _own(request.outputs.get("IMPORTANCE"), index, len(where)),
                    where,
                    _own(request.outputs.get("EMBEDDING"), index),
                )
                for index, where in enumerate(offsets)
            ]
            if not self._usable(found):
                raise EngineError(f"{self.first.model} gave logits that are no numbers")
            self._settle(query, range(len(query.rows)), 1, found, request.engine_ms)
        except Exception as error:  # noqa: BLE001  an engine thread must go on
            query.fail(error)

    def _settle(self, query: Query, rows: Sequence[int], level: int, found: Sequence[Level], engine_ms: Array) -> None:
        """Record what a level found of some rows; the unsure ones go on."""
        onward = []
        for index, one, took in zip(rows, found, engine_ms, strict=True):
            before = time.perf_counter()
            if self._decide(query, index, level, one):
                onward.append(index)
            row = query.rows[index]
            row.engine_ms += float(took)
            row.control_ms += (time.perf_counter() - before) * 1e3
        if onward:
            self._ask(query, onward, level + 1)
        query.done(len(rows) - len(onward))

    def _decide(self, query: Query, index: int, level: int, found: Level) -> bool:
        """Whether the row goes on; its answer so far, and what the next level reads, are put down."""
        row, control = query.rows[index], query.control
        row.texts, row.pruned, row.pending = row.left, row.pruned + row.pending, 0
        if row.joined is None:
            row.answer, row.joined = control.first(level, found), control.to_join(found)
        else:
            row.answer, row.joined = control.joined(row.joined, level, found)
        if level == 1 and query.level is None:
            self._meters.saw(row.answer.confidence)
        if query.level is not None or level >= control.levels or not self._draw(control.p_next(level, found)):
            return False
        left = control.left_of(row.texts, level, found)
        row.left, row.pending = left.texts, left.words
        return True

    def _draw(self, probability: float) -> bool:
        if probability <= 0 or probability >= 1:
            return probability >= 1
        with self._drawing:
            return self._random.random() < probability

    def _ask(self, query: Query, rows: Sequence[int], level: int) -> None:
        """Give rows to a later level; where that cannot be, what was found before is their answer."""
        model = self.candidate.levels[level - 1]
        texts = [query.rows[index].left for index in rows]
        outputs = self._outputs(model, level)
        started = time.perf_counter()

        def done(outcome: Outcome) -> None:
            try:
                if not isinstance(outcome, Exception) and not self._usable(outcome.rows):
                    outcome = EngineError(f"{model} gave logits that are none of task {self.table.task}")
                if isinstance(outcome, Exception):
                    self._fall_back(query, rows, outcome)
                    return
                took = (time.perf_counter() - started) * 1e3
                engine_ms = np.full(len(rows), took) if outcome.engine_ms is None else outcome.engine_ms.reshape(-1)
                self._settle(query, rows, level, outcome.rows, engine_ms)
            except Exception as error:  # noqa: BLE001  the thread that calls must go on
                query.fail(error)

        try:
            run = partial(self._client.call, model, texts, outputs, query.truncate)
            self._calls.submit(model, run, done, query.deadline)
        except Exception as error:  # noqa: BLE001  a level that cannot be asked leaves the answer there was
            done(error)

    def _outputs(self, model: str, level: int) -> list[str]:
        offered = self.table.model(model).outputs
        wanted = ["LOGITS", ENGINE_MS]
        if level < self.control.levels:
            wanted += ["EMBEDDING"] if self.table.is_regression else []
            wanted += ["IMPORTANCE", "OFFSETS"] if {"IMPORTANCE", "OFFSETS"} <= set(offered) else []
        return [name for name in wanted if name in offered]

    def _usable(self, found: Sequence[Level]) -> bool:
        labels = (len(self.table.labels),)
        return all(one.logits.shape == labels and bool(np.isfinite(one.logits).all()) for one in found)

    def _fall_back(self, query: Query, rows: Sequence[int], error: Exception) -> None:
        if any(query.rows[index].answer is None for index in rows):
            query.fail(error)
            return
        self._meters.fell_back(len(rows))
        query.done(len(rows))


def _own(values: Array | None, index: int, length: int | None = None) -> Array | None:
    return None if values is None else values[index][:length]
