"""Concurrent instances: `python -m bench.peers.transformers_instances FOLDER PRECISION COUNT`.

COUNT processes, each of which answers one request at a time by transformers' `generate`, batch 1, on one thread.
They are forked from one that has loaded the model, and share its weights, as the paper's instances do.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

from bench.peers.decode_worker import Ask, Replayed, send, serve
from bench.peers.transformers_models import generate, load


class Instances:
    """Forked processes that take requests from one queue."""

    def __init__(self, model: Any, count: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._asks: Any = fork.SimpleQueue()
        self._answers: Any = fork.SimpleQueue()
        for _ in range(count):
            fork.Process(target=self._serve, args=(model,), daemon=True).start()
        for _ in range(count):
            self._answers.get()

    def replay(self, asks: list[Ask]) -> Replayed:
        start = send(asks, lambda number, ask: self._asks.put((number, ask)))
        stamps: list[list[float]] = [[] for _ in asks]
        tokens: list[list[int]] = [[] for _ in asks]
        for _ in asks:
            number, instants, answer = self._answers.get()
            stamps[number] = [instant - start for instant in instants]
            tokens[number] = answer
        return Replayed(stamps, tokens)

    def _serve(self, model: Any) -> None:
        self._answers.put(None)
        while True:
            number, ask = self._asks.get()
            (instants,), (answer,) = generate(model, [ask])
            self._answers.put((number, instants, answer))


if __name__ == "__main__":
    folder, precision, count = sys.argv[1:]
    serve(Instances(load(Path(folder), precision, 1), int(count)).replay)
