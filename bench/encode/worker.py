"""Encoding without a server: `python -m bench.encode.worker in-process|sentence-transformers FOLDER`.

Latency includes tokenising.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.protocol import serve
from shapeshift.engines import manifest
from shapeshift.engines.execution.executor import EngineExecutor
from shapeshift.engines.execution.request import TextRequest
from shapeshift.engines.hardware import cores
from shapeshift.engines.text.tokenizer import FILE_NAME, TextTokenizer
from shapeshift.polymorph.settings import PolymorphSettings
from shapeshift.settings import Choices

Encode = Callable[[Sequence[str], int, int], list[float]]
"""encode(texts, concurrency, count): the latencies of `count` requests in ms."""


def in_process(folder: Path) -> Encode:
    """The engines of `folder` as the front model's process runs them, without Triton."""
    built = manifest.load(folder)
    tokenizer = TextTokenizer(folder / FILE_NAME, built.max_tokens)
    executor = EngineExecutor(built, folder, PolymorphSettings(max_queue_ms=0), lambda text: None)
    executor.wait_loaded(600)

    def encode(texts: Sequence[str], concurrency: int, count: int) -> list[float]:
        numbers = iter(range(count))
        latencies: list[float] = []
        lock = threading.Lock()
        done = threading.Semaphore(0)

        def send_next() -> None:
            with lock:
                number = next(numbers, None)
            if number is None:
                done.release()
                return
            before = time.perf_counter()
            ids = tokenizer.encode(texts[number % len(texts)].encode(), 0, False)

            def finished(request: TextRequest) -> None:
                if request.error is not None:
                    raise request.error
                latencies.append((time.perf_counter() - before) * 1e3)
                send_next()

            executor.submit(TextRequest([ids], finished))

        for _ in range(concurrency):
            send_next()
        for _ in range(concurrency):
            done.acquire()
        return latencies

    return encode


def sentence_transformers(folder: Path) -> Encode:
    """The library as a user calls it: each caller encodes one text, and callers take turns."""
    import torch
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 512
    torch.set_num_threads(cores())

    def encode(texts: Sequence[str], concurrency: int, count: int) -> list[float]:
        latencies: list[float] = []
        sent = [time.perf_counter()] * concurrency
        for number in range(count):
            model.encode([texts[number % len(texts)]], normalize_embeddings=True, show_progress_bar=False)
            now = time.perf_counter()
            latencies.append((now - sent[number % concurrency]) * 1e3)
            sent[number % concurrency] = now
        return latencies

    return encode


KINDS: Choices[Callable[[Path], Encode]] = Choices(
    "kind",
    {
        "in-process": "bench.encode.worker:in_process",
        "sentence-transformers": "bench.encode.worker:sentence_transformers",
    },
)


def main() -> None:
    """Serve requests from standard input until it closes."""
    encode = KINDS[sys.argv[1]](Path(sys.argv[2]))

    def answer(texts: Sequence[str], concurrency: int, count: int) -> dict[str, object]:
        start = time.perf_counter()
        latencies = encode(texts, concurrency, count)
        return {"latency_ms": latencies, "per_second": count / (time.perf_counter() - start)}

    serve(answer)


if __name__ == "__main__":
    main()
