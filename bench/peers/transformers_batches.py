"""Dynamic batching over transformers: `python -m bench.peers.transformers_batches FOLDER PRECISION THREADS`.

A batch starts when it is full, or when the window that its first request opens is over. Requests that arrive while a
batch runs wait for the next. The instant of a token is that of its step, although `generate` returns whole batches.
Requests that all arrive at once make one static batch.
"""

from __future__ import annotations

import queue
import sys
import time
from pathlib import Path
from typing import Any

from bench.peers.decode_worker import DecodeRequest, Replayed, send, serve
from bench.peers.transformers_models import generate, load

ROWS = 32


class Batches:
    """One model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def replay(
        self, requests: list[DecodeRequest], window_s: float = 0.0, num_beams: int = 1, most: int = ROWS
    ) -> Replayed:
        """most: requests of a batch. With beams, all tokens of an answer are there when its batch has ended."""
        due: queue.SimpleQueue[int] = queue.SimpleQueue()
        start = send(requests, lambda number, request: due.put(number))
        stamps: list[list[float]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        left, batches = len(requests), 0
        while left:
            numbers = _gather(due, min(most, left), window_s)
            at, made = generate(self._model, [requests[number] for number in numbers], num_beams)
            for number, instants, answer in zip(numbers, at, made, strict=True):
                stamps[number] = [instant - start for instant in instants]
                tokens[number] = answer
            left -= len(numbers)
            batches += 1
        return Replayed(stamps, tokens, {"batches": batches})


def _gather(due: queue.SimpleQueue[int], most: int, window_s: float) -> list[int]:
    numbers = [due.get()]
    end = time.perf_counter() + window_s
    while len(numbers) < most:
        try:
            numbers.append(due.get(timeout=max(0.0, end - time.perf_counter())))
        except queue.Empty:
            break
    return numbers


if __name__ == "__main__":
    folder, precision, threads = sys.argv[1:]
    serve(Batches(load(Path(folder), precision, int(threads))).replay)
