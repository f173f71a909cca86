"""Load for all five fronts of a running server, such that each panel of the page has something to show.

`python -m tests.live.load --seconds 30` sends it to the server of the build folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from shapeshift.cli.sidecar import host_and_ports

WORDS = (
    *("the", "quick", "transfer", "of", "small", "river", "stones", "to", "an", "open", "market", "took", "seven"),
    *("long", "days", "and", "a", "very", "patient", "crew"),
)
INTENTS = (
    "what is the exchange rate of dollars to euros",
    "please set an alarm for six tomorrow morning",
    "how do you say good night in italian",
    "is my card going to work over there and what might it cost me",
    "tell me something that i could do with that thing from yesterday",
    "will it rain in oslo",
)
SYSTEM = (
    "<|im_start|>system\nYou are a patient assistant who answers questions about history, nature, cooking and travel in"
    " plain sentences, without lists, and who says so when a question cannot be answered.<|im_end|>\n"
)
_TIMEOUT = aiohttp.ClientTimeout(total=30)


def text(rng: random.Random, words: int) -> str:
    """A text of so many words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def prompt(question: str, system: str = SYSTEM) -> str:
    """A turn of a chat."""
    return f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def string_input(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "shape": [1, 1], "datatype": "BYTES", "data": [value]}


class Load:
    """Requests to one server; `sent` and `failed` count them by front.

    scale: of all rates; adapters: names for `generate_lora`; fronts: who gets load.
    """

    def __init__(self, url: str, fronts: Sequence[str], adapters: Sequence[str], scale: float = 1.0) -> None:
        self.url, self.fronts, self.scale = url, fronts, scale
        self.adapters = adapters
        self.sent = dict.fromkeys(fronts, 0)
        self.failed = dict.fromkeys(fronts, 0)
        self._rng = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Send for so long, and wait for the answers."""
        kinds: dict[str, tuple[float, Callable[[], tuple[str, dict[str, Any]]]]] = {
            "encode": (60.0, self._encode),
            "classify_text": (25.0, self._classify_text),
            "classify_image": (60.0, self._classify_image),
            "generate": (2.0, self._generate),
            "generate_lora": (4.0, self._generate_lora),
        }
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as self._session:
            sending = [self._send(front, *kinds[front], seconds) for front in self.fronts]
            await asyncio.gather(*sending)
            await asyncio.gather(*self._tasks)

    async def _send(
        self, front: str, rate: float, make: Callable[[], tuple[str, dict[str, Any]]], seconds: float
    ) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # Bursts: load that comes evenly shares nothing.
            for _ in range(self._rng.choice((1, 1, 1, 2, 6))):
                self._start(front, self._post(front, *make()))
            await asyncio.sleep(self._rng.expovariate(rate * self.scale / 2.2))

    def _start(self, front: str, request: Awaitable[bool]) -> None:
        async def counted() -> None:
            self.sent[front] += 1
            self.failed[front] += not await request

        task = asyncio.ensure_future(counted())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _post(self, front: str, path: str, body: dict[str, Any]) -> bool:
        try:
            async with self._session.post(f"{self.url}/v2/models/{front}/{path}", json=body) as answer:
                await answer.read()
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    def _encode(self) -> tuple[str, dict[str, Any]]:
        # Short texts, and a tail of long ones that grows and shrinks over a minute.
        long_share = 0.02 + 0.1 * (time.monotonic() % 60 > 30)
        words = int(self._rng.lognormvariate(2.6, 0.6)) + 1
        if self._rng.random() < long_share:
            words = int(self._rng.uniform(60, 300))
        return "infer", {"inputs": [string_input("TEXT", text(self._rng, words))]}

    def _classify_text(self) -> tuple[str, dict[str, Any]]:
        return "infer", {"inputs": [string_input("TEXT", self._rng.choice(INTENTS))]}

    def _classify_image(self) -> tuple[str, dict[str, Any]]:
        # Bursts of a few seconds are more than the fastest gamma can serve.
        count = 16 if time.monotonic() % 12 > 7 else 2
        pixels = {"name": "PIXELS", "shape": [count, 4, 4, 3], "datatype": "UINT8"}
        data = [self._rng.randrange(256) for _ in range(count * 48)]
        deadline = self._rng.choice((100, 200, 400))
        return "infer", {"parameters": {"latency_ms": deadline}, "inputs": [{**pixels, "data": data}]}

    def _generate(self) -> tuple[str, dict[str, Any]]:
        question = text(self._rng, self._rng.choice((4, 8, 30)))
        body = {"text_input": prompt(question), "max_tokens": self._rng.choice((8, 24, 60)), "stream": True}
        return "generate_stream", body

    def _generate_lora(self) -> tuple[str, dict[str, Any]]:
        # A power law: few adapters get most requests.
        place = min(int(self._rng.paretovariate(0.9)) - 1, len(self.adapters) - 1)
        name = {"lora_name": self.adapters[place]} if self.adapters else {}
        question = text(self._rng, self._rng.choice((4, 8, 20)))
        return "generate", {"text_input": prompt(question, ""), "max_tokens": self._rng.choice((4, 12, 30)), **name}


async def ready_models(url: str) -> list[str]:
    """The fronts of `Load` that serve, and the adapters of `generate_lora`."""
    fronts = ("encode", "classify_text", "classify_image", "generate", "generate_lora")
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        states = [await session.get(f"{url}/v2/models/{front}/ready") for front in fronts]
    return [front for front, state in zip(fronts, states, strict=True) if state.status == 200]


def adapters_of(build: Path) -> list[str]:
    """The adapters that are registered for `generate_lora`."""
    file = build / "adapters" / "generate_lora" / "registry.json"
    return sorted(json.loads(file.read_text())["entries"]) if file.is_file() else []


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all rates")
    parser.add_argument("--fronts", default="", help="comma-separated; default: all that serve")
    parser.add_argument("--build", type=Path, default=Path("build"))
    options = parser.parse_args()
    running = host_and_ports(options.build / "run")
    if running is None:
        raise SystemExit(f"no server has run in {options.build / 'run'}")
    url = f"http://{running[0]}:{running[1]['http']}"
    fronts = options.fronts.split(",") if options.fronts else await ready_models(url)
    load = Load(url, fronts, adapters_of(options.build), options.scale)
    await load.run(options.seconds)
    print({front: f"{load.sent[front]} sent, {load.failed[front]} failed" for front in fronts})


if __name__ == "__main__":
    asyncio.run(main())
