"""The cascade that serves now, exchanged for another when the registry says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shapeshift.cascade import registry
from shapeshift.cascade.cascade import Cascade
from shapeshift.cascade.choice import choose
from shapeshift.cascade.levels import LevelClient, LevelGoneError
from shapeshift.cascade.meters import CascadeMeters
from shapeshift.cascade.registry import Chosen
from shapeshift.cascade.settings import CascadeSettings
from shapeshift.serving.log import Log

_LOOK_S = 1.0
_ASK_S = 0.2
_PATIENCE_S = 60.0
# Any answer to this, an error too, shows that a level is there.
_PROBE = [[b"a"]]


class Exchange:
    """Looks at the registry once a second; a candidate takes over when all its levels are there.

    open_cascade(chosen) makes the cascade of a candidate; what it raises, or a broken registry, changes nothing but a
    metric and the log.
    """

    def __init__(
        self,
        folder: Path,
        own: CascadeSettings,
        open_cascade: Callable[[Chosen], Cascade],
        client: LevelClient,
        meters: CascadeMeters,
        log: Log,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._folder = folder
        self._own = own
        self._open = open_cascade
        self._client = client
        self._meters = meters
        self._log = log
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._seen = self._stamp()
        chosen = self._chosen()
        self._state = (chosen.candidate, chosen.table)
        # At first a level that is not there yet is waited for by nobody: early answers can be given at once.
        self.current = open_cascade(chosen)
        meters.serve(chosen.candidate)
        self._thread = threading.Thread(target=self._run, name="candidates", daemon=True)
        self._thread.start()

    def take(self) -> Cascade:
        """The cascade for one query, entered."""
        with self._lock:
            self.current.enter()
            return self.current

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop looking, and close the cascade."""
        self._stop.set()
        self._thread.join(timeout_s)
        self.current.close()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                try:
                    self._change()
                except Exception as error:  # noqa: BLE001  a bad entry must not cost what serves
                    self._meters.refuse()
                    self._log(f"the candidates in {self._folder} stay as they were: {error}")

    def _change(self) -> None:
        chosen = self._chosen()
        if (chosen.candidate, chosen.table) == self._state:
            return
        for model in chosen.candidate.levels[1:]:
            self._wait_for(model, chosen.table.pairs)
        made = self._open(chosen)
        with self._lock:
            before, self.current = self.current, made
        self._state = (chosen.candidate, chosen.table)
        self._meters.serve(chosen.candidate)
        self._log(f"candidate {chosen.candidate.name} serves task {self._own.task}")
        before.close()

    def _chosen(self) -> Chosen:
        """What the registry says, or, where this model states targets and nothing is pinned, what meets these."""
        own = self._own
        found = registry.chosen(self._folder, own.task)
        if found.pinned or not (own.min_accuracy or own.max_latency_ms):
            return found
        choice = choose(found.table, own.min_accuracy, own.max_latency_ms)
        if choice.selected is None:
            best = choice.nearest
            self._log(f"no candidate of task {own.task} meets min_accuracy and max_latency_ms; the best is {best.name}")
        return replace(found, candidate=choice.serving)

    def _wait_for(self, model: str, pairs: bool) -> None:
        """Return when the model answers; LevelGoneError after a while."""
        end = time.monotonic() + self._patience_s
        while not self._stop.is_set():
            try:
                self._client.call(model, [[*_PROBE[0], b"a"]] if pairs else _PROBE, ["LOGITS"])
                return
            except LevelGoneError:
                if time.monotonic() > end:
                    raise
                self._stop.wait(_ASK_S)
            except Exception:  # noqa: BLE001  it is there, and says so
                return

    def _stamp(self) -> object:
        found: list[object] = []
        for name in (registry.FILE, f"{self._own.task}.json"):
            try:
                status = (self._folder / name).stat()
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)
