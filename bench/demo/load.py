"""A load for all fronts that changes shape within each turn, and is the same in each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, pi, sin
from typing import Any

import numpy as np

from bench.demo.fronts import Baseline
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.async_client import AsyncClient, ModelCall
from shapeshift.workloads.text import TextMaker

BUSY = {
    "encode": 30.0,
    "encode_workers": 18.0,
    "classify_image": 12.0,
    "generate": 1.5,
    "generate_lora": 3.0,
    "classify_text": 15.0,
}
"""Mean requests a second of the front that a turn is about."""
CALM = {"encode": 4.0, "classify_image": 1.0, "generate": 0.2, "generate_lora": 0.3, "classify_text": 2.0}
"""And of the others."""
FIRST_TOKENS, LAST_TOKENS = 30, 150
"""Of `encode_workers`: the median of the first texts, and of the last."""
_INTENTS = (
    "what is the exchange rate of dollars to euros",
    "please set an alarm for six tomorrow morning",
    "how do you say good night in italian",
    "is my card going to work over there and what might it cost me",
    "tell me something that i could do with that thing from yesterday",
    "will it rain in oslo",
)
_TIMEOUT_S = 120.0
_SYSTEM = (
    "<|im_start|>system\nYou are a patient assistant who answers questions about history, nature, cooking and travel in"
    " plain sentences, without lists, and who says so when a question cannot be answered.<|im_end|>\n"
)


@dataclass(frozen=True)
class Answer:
    """Of one request. seconds: from the intended instant; infinite where there was no answer, `error` says why."""

    front: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Request:
    """What is sent to a front. at: seconds from the beginning of the turn."""

    at: float
    front: str
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Any]


def requests(rates: Mapping[str, float], seconds: float, adapters: Sequence[str]) -> list[Request]:
    """The requests of a turn, in order; each time the same. rates: mean requests a second by front."""
    planned = []
    for number, (front, rate) in enumerate(sorted(rates.items())):
        rng, at = np.random.default_rng(number), 0.0
        maker = Maker(rng, adapters)
        make = getattr(maker, front)
        while (at := at + rng.exponential(1 / rate)) < seconds:
            planned.append(Request(_warped(front, at / seconds) * seconds, front, *make(at / seconds)))
    return sorted(planned, key=lambda request: request.at)


def _warped(front: str, part: float) -> float:
    """When a request is sent that would be due at this part of the turn if they came evenly."""
    if front == "classify_image":
        # Three bursts.
        return (int(3 * part) + (3 * part % 1) ** 2) / 3
    # Chats come and go, twice.
    return part - sin(4 * pi * part) / (5 * pi) if front == "generate" else part


class Maker:
    """Inputs and parameters of a request to each front, by its name. part: of the turn that has passed."""

    def __init__(self, rng: np.random.Generator, adapters: Sequence[str]) -> None:
        self._rng, self._adapters, self._texts = rng, adapters, TextMaker(rng)

    def encode(self, part: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Texts grow longer, and come back."""
        tokens = 1 + (9 + 140 * sin(pi * part) ** 2) * self._rng.lognormal(0, 0.5)
        return {"TEXT": [[self._texts.text(min(int(tokens), 480))]]}, {}

    def encode_workers(self, part: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Texts grow longer."""
        tokens = FIRST_TOKENS * (LAST_TOKENS / FIRST_TOKENS) ** part * self._rng.lognormal(0, 0.3)
        return {"TEXT": [[self._texts.text(min(int(tokens), 480))]]}, {}

    def classify_text(self, part: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Texts that are easy, and some that are not."""
        return {"TEXT": [[str(self._rng.choice(_INTENTS))]]}, {}

    def classify_image(self, part: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Two images with a deadline."""
        pixels = self._rng.integers(0, 256, (2, 4, 4, 3), np.uint8)
        return {"PIXELS": pixels}, {"latency_ms": float(self._rng.choice((100, 200, 400)))}

    def generate(self, part: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Chats that begin alike."""
        return self._prompt(_SYSTEM, (5, 10, 40), (8, 24, 60)), {}

    def generate_lora(self, part: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Adapters follow a power law; who is first in it changes three times."""
        place = int(self._rng.pareto(0.7)) + int(4 * part) * 5
        parameters = {"lora_name": self._adapters[place % len(self._adapters)]}
        return self._prompt("", (5, 10, 25), (4, 8, 16)), parameters

    def _prompt(self, system: str, lengths: Sequence[int], answers: Sequence[int]) -> dict[str, Any]:
        question, tokens = self._texts.text(int(self._rng.choice(lengths))), self._rng.choice(answers)
        return {
            "text_input": [f"{system}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"],
            "max_tokens": np.array([tokens], np.int32),
            "stream": [True],
            "ignore_eos": [True],
        }


async def send(
    url: str, planned: Sequence[Request], drain_s: float, instead: Mapping[str, Baseline] | None = None
) -> list[Answer]:
    """Send each request at its time to the server at `url` (gRPC), whatever becomes of the others.

    drain_s: how long after the last one answers are waited for. instead: who answers in place of a front.
    """
    start, client, tasks = time.monotonic(), AsyncClient(url), []
    for request in planned:
        await asyncio.sleep(max(0.0, start + request.at - time.monotonic()))
        tasks.append(asyncio.create_task(_answer(client, request, start, (instead or {}).get(request.front))))
    for task in (await asyncio.wait(tasks, timeout=drain_s))[1]:
        task.cancel()
    answers = await asyncio.gather(*tasks)
    await client.close()
    return answers


async def _answer(client: AsyncClient, request: Request, start: float, baseline: Baseline | None) -> Answer:
    model = baseline.model if baseline else request.front
    parameters = {**request.parameters, **(baseline.parameters if baseline else {})}
    arrays = {name: np.asarray(values) for name, values in request.inputs.items()}
    inputs = {name: array.astype(object) if array.dtype.kind == "U" else array for name, array in arrays.items()}
    call = ModelCall(model, inputs, _TIMEOUT_S, parameters=parameters)
    try:
        if "stream" in inputs:
            async for _ in client.stream(call):
                pass
        else:
            await client.infer(call)
    except ShapeshiftError as error:
        return Answer(request.front, inf, str(error))
    except asyncio.CancelledError:
        return Answer(request.front, inf, "no answer within the turn")
    return Answer(request.front, time.monotonic() - start - request.at)
