"""Predicted answer lengths (Chameleon, section 4, which takes an existing predictor)."""

from __future__ import annotations

import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

Floats = NDArray[np.float64]

MEMORY = 50
"""Answers after which the weight of an older one in the running mean is below 1/e."""
MAX_ADAPTERS = 4096
MOST_BYTES = 1000
"""The end of a prompt whose words are read; they take 0.1 ms."""
_BITS = 13
_WORD = re.compile(rb"[\w\x80-\xff]+|[^\w\s]")


@dataclass(frozen=True)
class PredictionInput:
    """What is known of a request before it runs.

    truth  actual length of the answer; known in experiments only
    text   the prompt; empty if its tokens were sent instead
    """

    adapter: str | None
    prompt_tokens: int
    max_new_tokens: int
    truth: int | None = None
    text: bytes = b""


class LengthPredictor(Protocol):
    """Predicts the length of answers. Any thread may call it."""

    def predict(self, request: PredictionInput) -> int:
        """Predicted tokens of the answer, 1 to `max_new_tokens`; never blocks."""
        ...

    def learn(self, request: PredictionInput, generated: int) -> None:
        """Report that the answer had `generated` tokens."""
        ...


class RunningMean(LengthPredictor):
    """The mean length of an adapter's recent answers; for a new adapter, the mean over all adapters.

    Before any answer: `max_new_tokens`.
    """

    def __init__(self, memory: int = MEMORY, max_adapters: int = MAX_ADAPTERS) -> None:
        require(memory >= 1, "memory", memory, "at least 1")
        require(max_adapters >= 1, "max_adapters", max_adapters, "at least 1")
        self._memory = memory
        self._max_adapters = max_adapters
        self._means: OrderedDict[str | None, tuple[int, float]] = OrderedDict()
        self._all = (0, 0.0)
        self._lock = threading.Lock()

    def predict(self, request: PredictionInput) -> int:
        count, mean = self._means.get(request.adapter, self._all)
        return _within(mean if count else request.max_new_tokens, request)

    def learn(self, request: PredictionInput, generated: int) -> None:
        with self._lock:
            self._means[request.adapter] = self._updated(self._means.get(request.adapter, (0, 0.0)), generated)
            self._means.move_to_end(request.adapter)
            if len(self._means) > self._max_adapters:
                self._means.popitem(last=False)
            self._all = self._updated(self._all, generated)

    def _updated(self, state: tuple[int, float], value: int) -> tuple[int, float]:
        count = min(state[0] + 1, self._memory)
        return count, state[1] + (value - state[1]) / count


class WordRegressor(LengthPredictor):
    """Ridge regression of the logarithm of the answer's length over the words of the prompt, without an adapter.

    Requests with adapters, or without a text, get the running mean, which learns from all: an adapter's answers are
    alike, and its mean is right after the first one.
    """

    def __init__(self, weights: Floats) -> None:
        """weights: of the words by their hashes (`word_places`), and last the constant."""
        size = (1 << _BITS) + 1
        require(weights.shape == (size,), "weights", weights.shape, f"[{size}], as `save` writes them")
        require(bool(np.isfinite(weights).all()), "weights", "not all finite", "finite numbers")
        self._weights = weights
        self._mean = RunningMean()

    @classmethod
    def train(cls, prompts: Sequence[bytes], generated: Sequence[int], ridge: float = 10.0) -> WordRegressor:
        """Fit to prompts, as the model reads them, and the lengths of their answers in tokens."""
        inputs = np.zeros((len(prompts), 1 << _BITS))
        for row, prompt in zip(inputs, prompts, strict=True):
            row[word_places(prompt)] = 1
        mean, target = inputs.mean(axis=0), np.log1p(generated)
        centered = inputs - mean
        # There are fewer prompts than words.
        gram = centered @ centered.T + ridge * np.eye(len(prompts))
        slopes = centered.T @ np.linalg.solve(gram, target - target.mean())
        return cls(np.append(slopes, target.mean() - mean @ slopes))

    @classmethod
    def load(cls, file: Path) -> WordRegressor:
        """Read the weights that `save` wrote. Raises InvalidInputError naming a file that is unreadable or invalid."""
        try:
            weights = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InvalidInputError("predictor_weights", str(file), f"a .npy file of weights ({error})") from None
        return cls(np.asarray(weights, np.float64))

    def save(self, file: Path) -> None:
        """Write the weights as a .npy file."""
        with file.open("wb") as output:
            np.save(output, self._weights.astype(np.float32), allow_pickle=False)

    def predict(self, request: PredictionInput) -> int:
        if request.adapter is not None or not request.text:
            return self._mean.predict(request)
        exponent = float(self._weights[word_places(request.text)].sum() + self._weights[-1])
        return _within(float(np.expm1(min(exponent, 50.0))), request)

    def learn(self, request: PredictionInput, generated: int) -> None:
        self._mean.learn(request, generated)


def word_places(text: bytes) -> list[int]:
    """The hashes of the words and of the pairs of neighbours at the end of a text, each once."""
    places, previous = set(), 0
    for word in _WORD.findall(text[-MOST_BYTES:].lower()):
        places |= {zlib.crc32(word) % (1 << _BITS), zlib.crc32(word, previous) % (1 << _BITS)}
        previous = zlib.crc32(word)
    return sorted(places)


class Oracle(LengthPredictor):
    """For experiments: the actual length for a share `accuracy` of the requests, a random one for the others.

    The logarithm of a random length is uniform.
    """

    def __init__(self, accuracy: float, seed: int = 0) -> None:
        require(0 <= accuracy <= 1, "accuracy", accuracy, "0 to 1")
        self._accuracy = accuracy
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def predict(self, request: PredictionInput) -> int:
        require(request.truth is not None, "truth", request.truth, "the actual length of the answer")
        assert request.truth is not None
        with self._lock:
            draw, exponent = self._rng.random(), self._rng.random()
        return _within(request.truth if draw < self._accuracy else request.max_new_tokens**exponent, request)

    def learn(self, request: PredictionInput, generated: int) -> None:
        """Nothing to learn."""


def _within(tokens: float, request: PredictionInput) -> int:
    return max(1, min(round(tokens), request.max_new_tokens))
