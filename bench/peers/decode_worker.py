"""What a process that generates for a benchmark reads and writes; the standard library only, for any interpreter.

One JSON object a line each way: {"asks": [{"at_s": 0.0, "prompt": [ids], "new": n}, ...], "options": {}} in, the
fields of `Replayed` out. Every request gets just `new` tokens, the likeliest ones, whatever they are.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LEAD_S = 0.05


@dataclass(frozen=True)
class Ask:
    """A request: the instant it comes at in seconds from the start, its prompt, how many tokens it wants."""

    at_s: float
    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Replayed:
    """What became of the asks, in their order.

    stamps  of each, the instant of every token in seconds from the start
    tokens  of each, the tokens themselves
    extra   further figures, by name
    """

    stamps: list[list[float]]
    tokens: list[list[int]]
    extra: dict[str, float] = field(default_factory=dict)


def serve(replay: Callable[..., Replayed]) -> None:
    """Answer lines by replay(asks, **options) until standard input closes; what else is printed goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        replayed = replay([Ask(**ask) for ask in asked["asks"]], **asked["options"])
        print(json.dumps(dataclasses.asdict(replayed)), file=answers, flush=True)


def send(asks: Sequence[Ask], submit: Callable[[int, Ask], None]) -> float:
    """Call submit(number, ask) for each ask when it is due, from a thread of its own; the start, as perf_counter."""
    start = time.perf_counter() + LEAD_S

    def run() -> None:
        for number, ask in sorted(enumerate(asks), key=lambda one: one[1].at_s):
            if (wait := start + ask.at_s - time.perf_counter()) > 0:
                time.sleep(wait)
            submit(number, ask)

    threading.Thread(target=run, daemon=True).start()
    return start
