"""One classification request on its way through the levels, and its rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shapeshift.cascade.policy.control import Answer, Control, LevelOutput
from shapeshift.cascade.policy.pruning import PrunedTexts
from shapeshift.cascade.policy.routing import Array
from shapeshift.serving.front import Client
from shapeshift.serving.parameters import RequestParameters


class LevelResult(NamedTuple):
    """What a level computed of several rows. engine_ms: [rows]."""

    outputs: list[LevelOutput]
    engine_ms: Array


class Row:
    """One text, or one pair of texts, of a request."""

    __slots__ = (
        *("_next_pruned", "answer", "control_ms", "engine_ms", "ensemble", "next_texts", "num_tokens", "texts"),
        "words_pruned",
    )

    def __init__(self, texts: Sequence[bytes]) -> None:
        # What the last level that answered has read, and what the next one reads.
        self.texts = self.next_texts = list(texts)
        # Words that levels which have answered did not read, and how many more the next level does not read.
        self.words_pruned = 0
        self._next_pruned = 0
        # What the first level has read.
        self.num_tokens = 0
        # The answer so far, and the ensemble that the next level's output is added to.
        self.answer: Answer | None = None
        self.ensemble: Array | None = None
        self.engine_ms = 0.0
        self.control_ms = 0.0

    def record(self, answer: Answer, ensemble: Array) -> None:
        """Replace the answer: a level has answered `next_texts`."""
        self.answer, self.ensemble = answer, ensemble
        self.texts = self.next_texts
        self.words_pruned += self._next_pruned
        self._next_pruned = 0

    def go_on(self, pruned: PrunedTexts) -> None:
        """Set what the next level reads."""
        self.next_texts, self._next_pruned = pruned

    @property
    def final(self) -> Answer:
        """The answer of a finished row."""
        assert self.answer is not None
        return self.answer


class ClassifyRequest:
    """The rows of a request. Calls done(request) once: when all rows are finished, or when `error` is set.

    client: who gets the answer, and `outputs` of it. control: the decisions of the candidate that serves it, which
    `begin` sets. level: the one that the client asked for, or None; truncate: whether levels may cut its texts.
    """

    control: Control

    def __init__(
        self,
        client: Client,
        texts: Sequence[Sequence[bytes]],
        outputs: Sequence[str],
        given: RequestParameters,
        done: Callable[[ClassifyRequest], None],
    ) -> None:
        self.client = client
        self.outputs = outputs
        self.rows = [Row(row) for row in texts]
        self.given = given
        self.level = given.level
        self.truncate = given.truncate
        self.arrived = time.monotonic()
        self.deadline = None if given.latency_ms is None else self.arrived + given.latency_ms / 1e3
        self.error: Exception | None = None
        self._done = done
        self._release: Callable[[], object] = bool
        self._unfinished = len(self.rows)
        self._lock = threading.Lock()

    def begin(self, control: Control, release: Callable[[], None]) -> None:
        """A candidate serves it from now on. release: called when it has ended."""
        self.control = control
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
