"""A Triton in this process: fronts that describe themselves and answer by a simple rule."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np

from shapeshift.errors import EngineError, ModelError, ModelGoneError
from shapeshift.triton.async_client import AsyncClient, ModelCall, Tensors

WIDTH = 4
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
FRONTS: dict[str, dict[str, Any]] = {
    "encode": {
        "kind": "embedding",
        "checkpoint": "all-MiniLM-L6-v2",
        "max_tokens": 512,
        "max_batch_size": 4,
        "embedding_size": WIDTH,
        "outputs": ["EMBEDDING", "NUM_TOKENS", "TOKENS"],
    },
    "cross": {
        "kind": "reranking",
        "also": ["text_classification"],
        "activation": "sigmoid",
        "pairs": True,
        "only_pairs": True,
        "max_batch_size": 4,
        "outputs": ["LOGITS", "NUM_TOKENS"],
        "labels": ["score"],
    },
    "classify_text": {
        "kind": "text_classification",
        "max_batch_size": 4,
        "outputs": ["LABEL", "PROBABILITIES", "CONFIDENCE", "NUM_TOKENS"],
        "labels": ["short", "long"],
    },
    "classify_raw": {
        "kind": "text_classification",
        "max_batch_size": 4,
        "outputs": ["LOGITS"],
        "activation": "softmax",
        "labels": ["short", "long"],
    },
    "score": {
        "kind": "text_classification",
        "also": ["reranking"],
        "activation": "identity",
        "pairs": True,
        "max_batch_size": 4,
        "outputs": ["LOGITS"],
        "labels": ["score"],
    },
    "topics": {
        "kind": "text_classification",
        "activation": "sigmoid",
        "pairs": True,
        "max_batch_size": 4,
        "outputs": ["LOGITS"],
        "labels": ["short", "long"],
    },
    "classify_image": {
        "kind": "image_classification",
        "max_batch_size": 4,
        "outputs": ["LABEL", "PROBABILITIES", "OUTCOME"],
        "tasks": ["cifar10"],
    },
    "generate": {
        "kind": "generation",
        "max_tokens": 64,
        "outputs": ["text_output", "stop_reason", "TOKENS"],
        "unary": "generate_unary",
        "stream": "generate",
        "chat_template": TEMPLATE,
        "special_tokens": {},
    },
    "generate_unary": {"kind": "generation", "max_tokens": 64, "unary": "generate_unary", "stream": "generate"},
    "generate_lora": {
        "kind": "generation",
        "max_tokens": 64,
        "stream": "generate_lora",
        "adapters": ["shout", "encode"],
        "chat_template": None,
    },
}


def with_templates(templates: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Fronts that generate, by name, each with its chat template."""
    return {
        name: {**FRONTS["generate"], "stream": name, "chat_template": template, "max_tokens": 512}
        for name, template in templates.items()
    }


class FakeTriton(AsyncClient):
    """Answers for `fronts`. calls: those that were made, without those for descriptions.

    failure: what every call raises; late_failure: what a stream raises behind its first piece; pause_s: before each.
    cancelled: `id` of the calls of streams that were left early.
    A generated answer repeats the prompt's words. answers: the tokens of the next ones, where they are other; cached:
    those of each prompt that were computed before, where the front tells.
    """

    def __init__(self, fronts: dict[str, dict[str, Any]] | None = None, url: str = "fake:1") -> None:
        super().__init__(url)
        self.fronts = FRONTS if fronts is None else fronts
        self.calls: list[ModelCall] = []
        self.failure: Exception | None = None
        self.late_failure: Exception | None = None
        self.gone = False
        self.pause_s = 0.0
        self.cancelled: list[int] = []
        self.answers: list[list[str]] = []
        self.cached: int | None = None

    async def models(self, timeout_s: float) -> list[str]:
        self._require_there()
        return sorted([*self.fronts, "encode_w00", "other"])

    async def is_live(self, timeout_s: float) -> bool:
        return not self.gone

    async def infer(self, call: ModelCall) -> Tensors:
        self._require_there()
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
        await asyncio.sleep(self.pause_s)
        return {name: self._output(call, name) for name in call.outputs}

    async def stream(self, call: ModelCall) -> AsyncGenerator[Tensors, None]:
        self._require_there()
        if call.outputs == ("DESCRIPTION",):
            if call.model not in self.fronts:
                raise ModelError("outputs: no output DESCRIPTION", "INVALID_ARG")
            if self.fronts[call.model].get("max_batch_size") and not call.inputs:
                raise EngineError("out of bounds index 0: request has 0 inputs")
            yield {"DESCRIPTION": np.array([json.dumps(self.fronts[call.model]).encode()], dtype=object)}
            return
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
        if call.outputs == ("TOKENS",):
            yield {"TOKENS": _bytes(_listed(call))}
            return
        ended = False
        try:
            for tensors in _generated(call, self.answers.pop(0) if self.answers else None):
                await asyncio.sleep(self.pause_s)
                if self.cached is not None:
                    tensors["num_cached_tokens"] = np.full_like(tensors["num_input_tokens"], self.cached)
                yield tensors
                if self.late_failure is not None:
                    raise self.late_failure
            ended = True
        finally:
            if not ended:
                self.cancelled.append(id(call))

    def _require_there(self) -> None:
        if self.gone:
            raise ModelGoneError("failed to connect to all addresses")

    def _output(self, call: ModelCall, name: str) -> Any:
        if "IMAGE" in call.inputs:
            rows = len(call.inputs["IMAGE"])
            made: dict[str, Any] = {
                "LABEL": np.array([[b"cat"]] * rows, dtype=object),
                "PROBABILITIES": np.tile(np.array([0.75, 0.25], np.float32), (rows, 1)),
                "OUTCOME": np.array([[b"in_time"]] * rows, dtype=object),
            }
            return made[name]
        lengths = _lengths(call)
        high = 1 / (1 + np.exp(-(lengths - 5.0)))
        made = {
            "EMBEDDING": np.stack([lengths + place for place in range(WIDTH)], 1).astype(np.float32),
            "PROBABILITIES": np.stack([1 - high, high], 1).astype(np.float32),
            "LABEL": np.array([[b"long" if one > 0.5 else b"short"] for one in high], dtype=object),
            "CONFIDENCE": high[:, None].astype(np.float32),
            "LOGITS": np.stack([0 * lengths, lengths - 5.0], 1).astype(np.float32),
            "NUM_TOKENS": lengths[:, None].astype(np.int32),
        }
        made |= _of_tokens(lengths.astype(int))
        if name == "LOGITS" and self.fronts[call.model]["labels"] == ["score"]:
            return (lengths[:, None] - 5.0).astype(np.float32)
        return made[name]


def _of_tokens(lengths: Any) -> dict[str, Any]:
    """Of a text of n characters n - 1 vectors, behind a token without one, and weights 1 to n of the terms 1 to n."""
    places = np.arange(lengths.max()) + 1
    there = places <= lengths[:, None]
    vectors = np.stack([places, lengths.max() - places, places % 2], 1).astype(np.float32)
    return {
        "TOKEN_EMBEDDING": np.where((there & (places > 1))[:, :, None], vectors / 8, 0).astype(np.float32),
        "SPARSE_INDICES": np.where(there, places, -1).astype(np.int32),
        "SPARSE_VALUES": np.where(there, places / 2, 0).astype(np.float32),
        "TOKEN_LOGITS": np.where(there[:, :, None], np.stack([places, 0 * places], 1), 0).astype(np.float32),
        "ENTITIES": np.array([[json.dumps([{"end": int(length)}]).encode()] for length in lengths], dtype=object),
    }


def _listed(call: ModelCall) -> list[str]:
    """TOKENS as a front has them: each word is a token, between the special ones 1 and 2."""
    if "input_ids" in call.inputs:
        ends = np.cumsum(call.inputs["input_lengths"])[:-1]
        rows = [ids.tolist() for ids in np.split(call.inputs["input_ids"], ends)]
        return [
            json.dumps({"text": " ".join(map(str, ids)), "ids": ids, "tokens": list("x" * len(ids))}) for ids in rows
        ]
    listed = []
    for text in (call.inputs["text_input"] if "text_input" in call.inputs else call.inputs["TEXT"]).reshape(-1):
        words = [(match[0], match.span()) for match in re.finditer(r"\S+", text.decode())]
        tokens = [("[CLS]", (0, 0)), *words, ("[SEP]", (0, 0))]
        ids = [1, *range(10, 10 + len(words)), 2]
        named = {"text": text.decode(), "ids": ids, "tokens": [word for word, _ in tokens]}
        special = [1, *[0] * len(words), 1]
        listed.append(json.dumps({**named, "offsets": [span for _, span in tokens], "special": special}))
    return listed


def _lengths(call: ModelCall) -> Any:
    if "INPUT_IDS" in call.inputs:
        return call.inputs["ATTENTION_MASK"].sum(1).astype(float)
    name = "TEXT_PAIR" if "TEXT_PAIR" in call.inputs else "TEXT"
    return np.array([len(text) for (text,) in call.inputs[name]], float)


def _generated(call: ModelCall, said: list[str] | None = None) -> list[Tensors]:
    inputs = call.inputs
    sampling = json.loads(inputs["sampling_parameters"][0]) if "sampling_parameters" in inputs else {}
    if "input_ids" in inputs:
        ends = np.cumsum(inputs["input_lengths"])[:-1]
        prompts = [" ".join(map(str, ids)) for ids in np.split(inputs["input_ids"], ends)]
    else:
        prompts = [text.decode() for text in inputs["text_input"]]
    n = sampling.get("n", 1)
    if n < 1:
        # As a front does.
        raise ModelError(f"n: got {n}; a whole number at least 1", "INVALID_ARG")
    most = sampling.get("max_tokens", 16)
    answers = [(said or prompt.split())[:most] for prompt in prompts for _ in range(n)]
    stops = [next((word for word in words if word in sampling.get("stop", [])), None) for words in answers]
    answers = [
        words if stop is None else words[: words.index(stop)] for words, stop in zip(answers, stops, strict=True)
    ]
    space = "" if said else " "
    several = len(answers) > 1
    logprobs = inputs.get("return_logprobs") is not None and sampling.get("logprobs") is not None
    prompt_tokens = [len(prompts[place // n].split()) for place in range(len(answers))]
    if not inputs["stream"][0]:
        pieces = [[(place, words, True) for place, words in enumerate(answers)]]
    else:
        longest = max(map(len, answers))
        pieces = []
        for step in range(longest):
            pieces.append(
                [
                    (at, words[step : step + 1], step == len(words) - 1)
                    for at, words in enumerate(answers)
                    if step < len(words)
                ]
            )
    echo = [prompts[place // n] if "exclude_input_in_output" in inputs else "" for place in range(len(answers))]
    found = []
    for number, rows in enumerate(pieces):
        tensors: Tensors = {
            "text_output": _bytes(echo[at] + space.join(words) + ("" if last else space) for at, words, last in rows),
            "num_input_tokens": np.array([prompt_tokens[place] for place, _, _ in rows], np.uint32),
            "num_output_tokens": np.array([len(words) for _, words, _ in rows], np.uint32),
        }
        if several:
            tensors["choice_index"] = np.array([place for place, _, _ in rows], np.int32)
        if any(last for _, _, last in rows):
            full = [len(answers[place]) == most for place, _, _ in rows]
            tensors["stop_reason"] = _bytes(json.dumps(stops[place] if last else None) for place, _, last in rows)
            tensors["finish_reason"] = _bytes(
                ("length" if cut else "stop") if last else "" for (_, _, last), cut in zip(rows, full, strict=True)
            )
        if logprobs:
            tensors["logprobs"] = _bytes(json.dumps([_token(word) for word in words]) for _, words, _ in rows)
        if sampling.get("prompt_logprobs") is not None and not number:
            tensors["prompt_logprobs"] = _bytes(
                json.dumps([None, *(_token(word) for word in prompt.split()[1:])]) for prompt in prompts
            )
        found.append(tensors)
    return found


def _token(word: str) -> dict[str, Any]:
    entry = {"logprob": -0.5, "rank": 2, "decoded_token": word, "bytes": list(word.encode())}
    other = {"logprob": -0.25, "rank": 1, "decoded_token": "x", "bytes": [120]}
    return {"7": entry, "8": other}


def _bytes(texts: Any) -> Any:
    return np.array([text.encode() for text in texts], dtype=object)
