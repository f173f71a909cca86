"""The thread that brings adapters from their files into the pool, beside the decode loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.adapter_cache import registry
from shapeshift.adapter_cache.record import Adapter
from shapeshift.engines.hardware import cores
from shapeshift.errors import EngineError, InvalidInputError

Store = Callable[[torch.Tensor, torch.Tensor, bool, float], bool]
Done = Callable[[Adapter, Exception | None, float], None]

_REST = 8.0 / cores()
"""Seconds that a load rests for each that it computed, while others compute: it takes a tenth of two cores, and less
of more."""
_SERIAL = 16384


def store(target: torch.Tensor, source: torch.Tensor, transposed: bool, scale: float) -> bool:
    """Write `source` [rows, columns], or its transpose, times `scale` into `target`; whether all of that is finite.

    In pieces that torch computes on the calling thread alone.
    """
    rows, columns = source.shape
    shaped = target.view(columns, rows).T if transposed else target.view(rows, columns)
    finite = True
    step = max(1, _SERIAL // columns)
    for row in range(0, rows, step):
        piece = source[row : row + step].float() * scale
        finite = finite and bool(torch.isfinite(piece).all())
        shaped[row : row + step] = piece.to(target.dtype)
    return finite


def fill(target: torch.Tensor, adapter: Adapter, write: Store = store, rest: Callable[[], None] = lambda: None) -> None:
    """Write an adapter's factors into its memory, [elements], as `layout.places` says; `rest()` is called in between.

    Raises InvalidInputError for weights that are not finite, EngineError for a file that has changed or cannot be
    read any more.
    """
    source = adapter.source
    try:
        if not adapter.verified:
            if registry.digest(source.folder, rest) != adapter.sha256:
                raise EngineError(f"adapter {adapter.label}: its files are not those that were registered")
            adapter.verified = True
        stat = source.weights.stat()
        if (stat.st_size, stat.st_mtime_ns) != source.stamp:
            raise EngineError(f"adapter {adapter.label}: {source.weights.name} has changed since it was registered")
        with safe_open(str(source.weights), framework="pt") as file:
            for factor in source.factors:
                a, b = file.get_tensor(factor.a), file.get_tensor(factor.b)
                offset = int(adapter.relative[factor.layer, factor.linear, factor.part, 0])
                ends = offset + a.numel(), offset + a.numel() + b.numel()
                if not write(target[offset : ends[0]], a, False, 1.0):
                    raise InvalidInputError(f"adapter {adapter.label}, {factor.a}", "NaN or infinity", "finite weights")
                if not write(target[ends[0] : ends[1]], b, True, factor.scale):
                    raise InvalidInputError(f"adapter {adapter.label}, {factor.b}", "NaN or infinity", "finite weights")
                rest()
    except (SafetensorError, OSError) as error:
        raise EngineError(f"adapter {adapter.label} cannot be read any more: {error}") from None


class Loader:
    """Loads one adapter after another. `done(adapter, error, seconds)` is called on its thread after each.

    While `busy()` it works in small pieces and rests between them: whoever is computing would wait for each of them.
    Onto a GPU it goes through pinned memory and a stream of its own; that has not been run by us.
    """

    def __init__(self, done: Done, write: Store = store, busy: Callable[[], bool] = lambda: False) -> None:
        self._done = done
        self._write = write
        self._busy = busy
        self._since = 0.0
        self._queue: queue.SimpleQueue[tuple[Adapter, torch.Tensor] | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
        self._thread.start()

    def submit(self, adapter: Adapter, target: torch.Tensor) -> None:
        """Fill `target`, [elements], which nobody else touches until `done`."""
        self._queue.put((adapter, target))

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the load that is under way and end the thread."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None and not self._closing:
            start, self._since = time.monotonic(), time.thread_time()
            error: Exception | None = None
            try:
                self._load(*job)
            except Exception as found:  # noqa: BLE001  one bad file must not end the thread
                error = found
            self._done(job[0], error, time.monotonic() - start)

    def _rest(self) -> None:
        if self._busy() and not self._closing:
            time.sleep(_REST * (time.thread_time() - self._since))
        self._since = time.thread_time()

    def _load(self, adapter: Adapter, target: torch.Tensor) -> None:
        with torch.inference_mode():
            if target.device.type != "cuda":
                fill(target, adapter, self._write, self._rest)
                return
            staged = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
            fill(staged, adapter, self._write, self._rest)
            stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                target.copy_(staged, non_blocking=True)
            stream.synchronize()
