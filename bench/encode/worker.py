"""The engine set of a folder without Triton: `python -m bench.encode.worker FOLDER`. Latency includes tokenising."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.peers.protocol import serve_encoding
from shapeshift.engines import manifest
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.interfaces import Adapted
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.polymorph.settings import PolymorphSettings


class Encoder:
    """The engines as the front model's process runs them."""

    def __init__(
        self,
        folder: Path,
        adapted: Callable[..., Adapted | None] = lambda rows: None,
        adapters: Sequence[Any] = (None,),
    ) -> None:
        """adapted: see `EngineExecutor`; adapters: those that requests have in turn."""
        built = manifest.load(folder)
        self._tokenizer = TextTokenizer(folder / FILE_NAME, built.max_tokens)
        self._executor = EngineExecutor(
            built, folder, PolymorphSettings(max_queue_ms=0), lambda text: None, adapted=adapted
        )
        self._adapters = adapters
        self._executor.wait_loaded(600)
        # As fronts do.
        gc.freeze()

    def closed(self, texts: Sequence[str], clients: int, count: int) -> dict[str, object]:
        """The latencies in ms of `count` requests of so many clients, and answers a second."""
        numbers = iter(range(count))
        latency_ms: list[float] = []
        lock = threading.Lock()
        done = threading.Semaphore(0)

        def send_next() -> None:
            with lock:
                number = next(numbers, None)
            if number is None:
                done.release()
                return
            before = time.perf_counter()
            ids = self._tokenizer.encode(texts[number % len(texts)].encode(), 0, False)

            def finished(request: TextRequest) -> None:
                if request.error is not None:
                    raise request.error
                latency_ms.append((time.perf_counter() - before) * 1e3)
                send_next()

            request = TextRequest([ids], finished)
            request.adapter = self._adapters[number % len(self._adapters)]
            self._executor.submit(request)

        start = time.perf_counter()
        for _ in range(clients):
            send_next()
        for _ in range(clients):
            done.acquire()
        return {"latency_ms": latency_ms, "per_second": count / (time.perf_counter() - start)}

    def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """The output EMBEDDING of each text, [texts, width]."""
        done = threading.Event()
        ids = [self._tokenizer.encode(text.encode(), row) for row, text in enumerate(texts)]
        request = TextRequest(ids, lambda finished: done.set())
        self._executor.submit(request)
        done.wait()
        if request.error is not None:
            raise request.error
        rows: list[list[float]] = request.outputs["EMBEDDING"].tolist()
        return rows


if __name__ == "__main__":
    encoder = Encoder(Path(sys.argv[1]))
    serve_encoding(encoder.closed, encoder.vectors)
