"""One client's request on its way through the engines, and its rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shapeshift.engines.protocol import TOKEN_OUTPUTS
from shapeshift.errors import CancelledRequestError, OverloadedError
from shapeshift.serving.text_inputs import Ids

Array = npt.NDArray[Any]
# A row that waits at most this long is computed without asking Triton whether its caller is still there.
_ASK_AFTER_S = 0.25


class Row:
    """One text of a request."""

    __slots__ = ("attempts", "done", "hung", "ids", "index", "request")

    def __init__(self, request: TextRequest, index: int, ids: Ids) -> None:
        self.request = request
        self.index = index
        self.ids = ids
        # Workers that were tried and failed.
        self.attempts = 0
        # Workers that were tried and gave no answer in time.
        self.hung = 0
        self.done = False

    @property
    def tokens(self) -> int:
        return len(self.ids)


class TextRequest:
    """Collects the outputs of its rows and reports once, when the last row is done or one has failed.

    finished(request) is called exactly once, on the thread that ended it; `outputs` ([rows, ...] by name;
    one value a token: [rows, longest], 0 beyond a row's end) or `error` is set by then.
    """

    def __init__(
        self,
        texts: Sequence[Ids],
        finished: Callable[[TextRequest], None],
        latency_ms: float | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.rows = [Row(self, index, ids) for index, ids in enumerate(texts)]
        self.arrived = time.monotonic()
        self.outputs: dict[str, Array] = {}
        self.engine_ms = np.zeros(len(self.rows), np.float32)
        self.error: Exception | None = None
        self._deadline = None if latency_ms is None else self.arrived + latency_ms / 1e3
        self._is_cancelled = is_cancelled
        self._finished = finished
        self._longest = max(map(len, texts), default=0)
        self._remaining = len(self.rows)
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        """Whether `finished` was called; rows that still wait need not be computed."""
        return self._remaining == 0

    @property
    def has_deadline(self) -> bool:
        """Whether the client gave a `latency_ms`."""
        return self._deadline is not None

    def fail_if_late(self) -> None:
        """End the request with OverloadedError if its `latency_ms` has run out."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.fail(OverloadedError("latency_ms ran out while the request waited; retry later or elsewhere"))

    def fail_if_abandoned(self) -> None:
        """End the request with CancelledRequestError if it has waited and Triton reports that its caller is gone."""
        if self._is_cancelled is None or time.monotonic() - self.arrived <= _ASK_AFTER_S:
            return
        # To ask once the answer is on its way ends the server (Triton 24.10): it is sent after the lock was free.
        with self._lock:
            gone = not self.ended and self._is_cancelled()
        if gone:
            self.fail(CancelledRequestError("the caller cancelled the request"))

    def still_wanted(self) -> bool:
        """Whether its rows are worth computing; ends it where its time has run out or its caller is gone."""
        self.fail_if_late()
        if not self.ended:
            self.fail_if_abandoned()
        return not self.ended

    def complete(self, row: Row, values: dict[str, Array], engine_ms: float = 0.0) -> None:
        """Record one row's outputs and how long the call took; a second answer to the same row changes nothing."""
        with self._lock:
            if self.ended or row.done:
                return
            row.done = True
            self.engine_ms[row.index] = engine_ms
            for name, value in values.items():
                if name in TOKEN_OUTPUTS:
                    # Computed beside longer texts a value is padded further than this request needs.
                    self.outputs.setdefault(name, np.zeros((len(self.rows), self._longest), value.dtype))
                    self.outputs[name][row.index, : row.tokens] = value[: row.tokens]
                    continue
                if name not in self.outputs:
                    self.outputs[name] = np.empty((len(self.rows), *value.shape), value.dtype)
                self.outputs[name][row.index] = value
            self._remaining -= 1
            last = self._remaining == 0
        if last:
            self._finished(self)

    def fail(self, error: Exception) -> None:
        """End the request with `error`, unless it has ended."""
        with self._lock:
            if self.ended:
                return
            self._remaining = 0
            self.error = error
        self._finished(self)
