"""Requests with known answers: asked one at a time before anything goes wrong, then held against every later answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.drill import models
from client.open_loop import Parameter, PlannedRequest, serialise
from shapeshift.engines.verify import MIN_COSINE
from shapeshift.serving.error_codes import FORWARDED
from shapeshift.token_adapt.tasks import examples
from shapeshift.triton import model_config
from shapeshift.workloads.text import TextMaker

Tensors = dict[str, NDArray[Any]]

STREAMS = ("generate", "generate_lora")
ADAPTERS = ("", "sentiment", "domain", "clock")
_PROMPTS = ("Once upon a time", "Read a file and", "Raise an error if", "A list of all", "Create a new")
_TOKENS = (4, 12, 24, 32)
_SENTENCES = (
    *(
        "what is the exchange rate of dollars to euros",
        "set an alarm for seven",
        "book a flight to rome",
    ),
    *("how do i change the oil in my car", "what is my account balance", "tell me a joke", "play some music by queen"),
    *("what is the weather like in boston today", "cancel my dinner reservation", "flip a coin for me", "good bye"),
)
_IMAGES = 48
_TEXT_TOKENS = (8, 16, 30, 60, 120, 300)


@dataclass
class Question:
    """One request and its answer. payload: a serialised ModelInferRequest.

    variants: requests by other ways to the same answer; a question is used where all of them agree.
    right: the right answer, once it has been asked for.
    """

    front: str
    payload: bytes
    variants: list[bytes] = field(default_factory=list)
    right: Tensors | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return self.front in STREAMS


class Judge:
    """Says whether answers are right. least_cosine: by front, of two vectors of one text."""

    def __init__(self, least_cosine: Mapping[str, float]) -> None:
        self._least_cosine = least_cosine

    def accepts(self, question: Question, answer: Tensors) -> bool:
        """Whether `answer` agrees with the right one."""
        right = question.right
        if right is None or right.keys() != answer.keys():
            return False
        if question.front in self._least_cosine:
            one, two = right["EMBEDDING"], answer["EMBEDDING"]
            return one.shape == two.shape and bool((_cosines(one, two) >= self._least_cosine[question.front]).all())
        return all(np.array_equal(right[name], answer[name]) for name in right)


def judge() -> Judge:
    """The judge of the drill's models, by the precision of their engines.

    Each of two vectors lies within the angle a of the reference; they lie within 2a: cos 2a = 2 cos(a)^2 - 1.
    """
    least = {}
    for front in ("encode", models.WITH_WORKERS):
        config = model_config.read(models.REPOSITORY / front / "config.pbtxt")
        least[front] = 2 * MIN_COSINE[model_config.parameters(config)["precision"]] ** 2 - 1
    return Judge(least)


def make(seed: int, tasks: Path = models.TASKS) -> dict[str, list[Question]]:
    """The questions by front, whose answers nobody knows yet. tasks: those of the images."""
    rng = np.random.default_rng(seed)
    maker = TextMaker(rng)
    texts = [[maker.text(tokens)] for tokens in _TEXT_TOKENS] + [[maker.text(tokens) for tokens in (10, 50, 20)]]
    questions = {
        front: [_text(front, rows, "EMBEDDING") for rows in texts] for front in ("encode", models.WITH_WORKERS)
    }
    questions["classify_text"] = [_text("classify_text", [text], "LABEL") for text in _SENTENCES]
    questions["classify_image"] = [_image(pixels) for pixels in _digits(tasks / "digits", rng)]
    for front in ("generate", "generate_unary"):
        questions[front] = [_prompt(front, prompt, tokens) for prompt in _PROMPTS for tokens in _TOKENS]
    for front in ("generate_lora", "generate_lora_unary"):
        questions[front] = [
            _prompt(front, prompt, tokens, adapter)
            for (prompt, tokens) in zip(_PROMPTS, (*_TOKENS, 16), strict=True)
            for adapter in ADAPTERS
        ]
    return questions


def prompt_payload(front: str, prompt: str, tokens: int, adapter: str = "") -> bytes:
    """A request for `tokens` greedy tokens; to a front that streams, as a stream."""
    inputs: dict[str, NDArray[Any]] = {
        "text_input": np.array([prompt], dtype=object),
        "max_tokens": np.array([tokens], dtype=np.int32),
        "temperature": np.array([0.0], dtype=np.float32),
        "ignore_eos": np.array([True]),
    }
    if front in STREAMS:
        inputs["stream"] = np.array([True])
    parameters: dict[str, Parameter] = {"lora_name": adapter} if adapter else {}
    if front in STREAMS:
        parameters["triton_enable_empty_final_response"] = True
        # Errors on a stream have no code of their own; this puts it into their text.
        parameters[FORWARDED] = True
    return _payload(front, inputs, parameters, ["text_output"])


def _prompt(front: str, prompt: str, tokens: int, adapter: str = "") -> Question:
    return Question(front, prompt_payload(front, prompt, tokens, adapter))


def _text(front: str, rows: Sequence[str], output: str) -> Question:
    inputs = {"TEXT": np.array([[row] for row in rows], dtype=object)}
    levels = (1, 2) if front == "classify_text" else ()
    variants = [_payload(front, inputs, {"level": level}, [output]) for level in levels]
    return Question(front, _payload(front, inputs, {}, [output]), variants)


def _image(pixels: NDArray[np.uint8]) -> Question:
    # The shorter the time, the fewer tokens the model keeps.
    payloads = [
        _payload(
            "classify_image",
            {"PIXELS": pixels[None]},
            {"task": "digits", "latency_ms": latency_ms, "utility": 1.0},
            ["LABEL"],
        )
        for latency_ms in (15000.0, 100.0, 30.0, 15.0)
    ]
    return Question("classify_image", payloads[0], payloads[1:])


def _digits(task: Path, rng: np.random.Generator) -> list[NDArray[np.uint8]]:
    with np.load(task / examples.FILE) as file:
        pixels = next(file[name] for name in file.files if file[name].ndim == 4)
    return [pixels[index] for index in rng.choice(len(pixels), _IMAGES, replace=False)]


def _payload(
    front: str, inputs: Mapping[str, NDArray[Any]], parameters: Mapping[str, Parameter], outputs: Sequence[str]
) -> bytes:
    return serialise(front, [PlannedRequest(0.0, inputs, parameters)], outputs)[0]


def _cosines(one: NDArray[Any], two: NDArray[Any]) -> NDArray[Any]:
    product = (one * two).sum(axis=1)
    return np.asarray(product / (np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)))
