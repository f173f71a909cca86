"""Concurrent instances: `python -m bench.peers.transformers_instances FOLDER PRECISION COUNT`.

COUNT processes, each of which answers one request at a time by transformers' `generate`, batch 1, on one thread. They
are forked from one process that has loaded the model and share its weights, as the paper's instances do.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

from bench.peers.decode_worker import DecodeRequest, Replayed, send, serve
from bench.peers.transformers_models import generate, load


class Instances:
    """Forked processes that take requests from one queue."""

    def __init__(self, model: Any, count: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._requests: Any = fork.SimpleQueue()
        self._answers: Any = fork.SimpleQueue()
        for _ in range(count):
            fork.Process(target=self._serve, args=(model,), daemon=True).start()
        for _ in range(count):
            self._answers.get()

    def replay(self, requests: list[DecodeRequest]) -> Replayed:
        start = send(requests, lambda number, request: self._requests.put((number, request)))
        stamps: list[list[float]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        for _ in requests:
            number, instants, answer = self._answers.get()
            stamps[number] = [instant - start for instant in instants]
            tokens[number] = answer
        return Replayed(stamps, tokens)

    def _serve(self, model: Any) -> None:
        self._answers.put(None)
        while True:
            number, request = self._requests.get()
            (instants,), (answer,) = generate(model, [request])
            self._answers.put((number, instants, answer))


if __name__ == "__main__":
    folder, precision, count = sys.argv[1:]
    serve(Instances(load(Path(folder), precision, 1), int(count)).replay)
