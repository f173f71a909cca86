"""Loading engines: a process starts with the tokenizer and one engine, and loads the others in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from shapeshift.engines.hardware import resident_mb
from shapeshift.engines.manifest import EngineEntry, Manifest
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.serving.model_args import Log

_NICENESS = 10


def open_tokenizer(folder: Path, manifest: Manifest) -> TextTokenizer:
    """The tokenizer in a folder of text engines."""
    stride = manifest.type_stride
    vocabulary = stride or manifest.vocabulary
    return TextTokenizer(folder / FILE_NAME, manifest.max_tokens, type_stride=stride, vocab_size=vocabulary)


def first_and_rest(manifest: Manifest) -> tuple[EngineEntry, list[EngineEntry]]:
    """The engine to start with (the dynamic one, or the longest), and the others, shortest first."""
    rest = list(manifest.engines)
    first = next((entry for entry in rest if entry.tokens is None), rest[-1])
    rest.remove(first)
    return first, rest


class BackgroundLoader:
    """Loads the `pending` engines in its own thread, those whose lengths have the most requests first.

    start() is called before that. load(entry) loads an engine and starts using it. lengths_seen[n] counts texts of n
    tokens; the caller updates it.
    Loading stops once `used_mb` gives more than `memory_mb`. An engine that fails to load is logged and skipped:
    other engines serve its lengths. The thread yields the processor to those that serve.
    """

    def __init__(
        self,
        pending: list[EngineEntry],
        load: Callable[[EngineEntry], None],
        lengths_seen: list[int],
        memory_mb: int,
        log: Log,
        start: Callable[[], None] = lambda: None,
        used_mb: Callable[[], float] = resident_mb,
    ) -> None:
        self._start = start
        self._pending = list(pending)
        edges = [0, *(entry.tokens or 0 for entry in pending)]
        self._bins = {entry: (low, entry.tokens or 0) for low, entry in zip(edges, pending, strict=False)}
        self._load = load
        self._lengths_seen = lengths_seen
        self._memory_mb, self._used_mb = memory_mb, used_mb
        self._log = log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the loader has finished. Returns whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop loading, and wait for the engine that is being loaded."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        # On Linux of this thread alone. Compiling engines takes seconds of the processors that serve meanwhile.
        os.nice(_NICENESS)
        self._start()
        pending = self._pending
        while pending and not self._stopping.is_set():
            if (used := self._used_mb()) > self._memory_mb:
                self._log(
                    f"memory_mb: {used:.0f} MiB used, limit {self._memory_mb}; {len(pending)} engines are not loaded"
                )
                return
            entry = max(pending, key=self._requests_of)
            pending.remove(entry)
            try:
                self._load(entry)
            except Exception as error:  # noqa: BLE001  other engines serve these lengths
                self._log(f"engine {entry.name} cannot be loaded, other engines serve its lengths: {error}")

    def _requests_of(self, entry: EngineEntry) -> int:
        low, high = self._bins[entry]
        return sum(self._lengths_seen[low + 1 : high + 1])
