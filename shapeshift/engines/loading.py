"""A process is ready with one engine; the others are loaded behind its back, the most wanted first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.serving.log import Log


def first_and_rest(manifest: Manifest) -> tuple[EngineEntry, list[EngineEntry]]:
    """The engine to be ready with, for any shape or else the longest, and the others, shortest first."""
    rest = list(manifest.engines)
    first = next((entry for entry in rest if entry.tokens is None), rest[-1])
    rest.remove(first)
    return first, rest


class BackgroundLoader:
    """Loads `waiting` in a thread of its own, those whose lengths were asked for most first.

    load(entry) takes an engine into use; lengths_seen[n] counts texts of n tokens and is read as it grows.
    Nothing more is loaded once the process takes more than `memory_mb`. An engine that cannot be loaded is
    logged and left out: others take its lengths.
    """

    def __init__(
        self,
        waiting: list[EngineEntry],
        load: Callable[[EngineEntry], None],
        lengths_seen: list[int],
        memory_mb: int,
        log: Log,
    ) -> None:
        self._waiting = list(waiting)
        edges = [0, *(entry.tokens or 0 for entry in waiting)]
        self._bins = {entry: (low, entry.tokens or 0) for low, entry in zip(edges, waiting, strict=False)}
        self._load = load
        self._seen = lengths_seen
        self._memory_mb = memory_mb
        self._log = log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every engine is loaded or given up; whether that is so."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 5.0) -> None:
        """Load no further engine, and wait for the one under way."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        waiting = self._waiting
        while waiting and not self._stopping.is_set():
            if (held := resident_mb()) > self._memory_mb:
                limit = f"{held:.0f} MiB held, memory_mb is {self._memory_mb}"
                self._log(f"{limit}: {len(waiting)} engines stay unloaded")
                return
            entry = max(waiting, key=self._wanted)
            waiting.remove(entry)
            try:
                self._load(entry)
            except Exception as error:  # noqa: BLE001  the other engines serve these lengths
                self._log(f"engine {entry.name} could not be loaded, others take its lengths: {error}")

    def _wanted(self, entry: EngineEntry) -> int:
        low, high = self._bins[entry]
        return sum(self._seen[low + 1 : high + 1])
