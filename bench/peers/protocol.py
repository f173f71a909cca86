"""The protocol of processes that work for a benchmark; standard library only, for any interpreter.

One JSON object a line each way. A process that generates gives every answer exactly `new_tokens` tokens, chosen
greedily, whatever they are.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LEAD_S = 0.05
SEQUENCES = 32
"""Requests that a peer runs at once."""
MOST_TOKENS = 2**14
"""Of the cache for long prompts, so that it has been used up before they are measured."""


@dataclass(frozen=True)
class DecodeRequest:
    """A request: its arrival in seconds from the start, its prompt, and the tokens of its answer."""

    at_s: float
    prompt: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Replayed:
    """The answers to the requests, in their order.

    stamps  of each request, the instant of every token in seconds from the start
    tokens  of each request, the tokens
    extra   further figures, by name
    """

    stamps: list[list[float]]
    tokens: list[list[int]]
    extra: dict[str, float] = field(default_factory=dict)

    @classmethod
    def empty(cls, requests: int) -> Replayed:
        """For so many requests, to be filled as they are answered."""
        return cls([[] for _ in range(requests)], [[] for _ in range(requests)])


def serve(answer: Callable[..., object]) -> None:
    """Answer lines by answer(**message) until standard input closes; other prints go to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)


def serve_encoding(closed: Callable[..., object], vectors: Callable[[list[str]], list[list[float]]]) -> None:
    """Answer messages {"texts": [texts], "clients": n, "count": n} by closed(**message), and {"texts": [texts]} by
    {"vectors": vectors(texts)}."""
    serve(lambda texts, **loop: closed(texts, **loop) if loop else {"vectors": vectors(texts)})


def serve_decoding(replay: Callable[..., Replayed]) -> None:
    """Answer messages {"requests": [{"at_s": 0.0, "prompt": [ids], "new_tokens": n}, ...], "options": {}} by the fields
    of replay(requests, **options)."""

    def answer(requests: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(replay([DecodeRequest(**request) for request in requests], **options))

    serve(answer)


def send(requests: Sequence[DecodeRequest], submit: Callable[[int, DecodeRequest], None]) -> float:
    """Call submit(number, request) for each request when it is due, from another thread; the start, as perf_counter."""
    start = time.perf_counter() + LEAD_S

    def run() -> None:
        for number, request in sorted(enumerate(requests), key=lambda one: one[1].at_s):
            if (wait := start + request.at_s - time.perf_counter()) > 0:
                time.sleep(wait)
            submit(number, request)

    threading.Thread(target=run, daemon=True).start()
    return start


class Stepper(Protocol):
    """A program that generates in steps, between which requests join and leave. most: that run at once."""

    most: int

    def add(self, number: int, request: DecodeRequest) -> None: ...

    def step(self) -> list[tuple[int, list[int]]]:
        """The number of each running request, once, and the tokens that it got."""
        ...

    def drop(self, number: int) -> None: ...


def replay_in_steps(stepper: Stepper, requests: list[DecodeRequest]) -> Replayed:
    """Serve the requests to the end, each from when it is due. Also reported: the steps."""
    due: queue.SimpleQueue[tuple[int, DecodeRequest]] = queue.SimpleQueue()
    start = send(requests, lambda number, request: due.put((number, request)))
    replayed = Replayed.empty(len(requests))
    running, left, steps = 0, len(requests), 0
    while left:
        while running < stepper.most and (not due.empty() or not running):
            stepper.add(*due.get())
            running += 1
        generated = stepper.step()
        now, steps = time.perf_counter() - start, steps + 1
        for number, tokens in generated:
            replayed.tokens[number] += tokens
            replayed.stamps[number] += [now] * len(tokens)
            if len(replayed.tokens[number]) >= requests[number].new_tokens:
                stepper.drop(number)
                running, left = running - 1, left - 1
    replayed.extra["iterations"] = steps
    return replayed
