"""Predicted answer lengths (Chameleon, section 4, which takes an existing predictor)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class PredictionInput:
    """What is known of a request before it runs.

    embedding  of the prompt, [n]; None if it was not computed
    truth      actual length of the answer; known in experiments only
    text       the prompt
    """

    adapter: str | None
    prompt_tokens: int
    max_new_tokens: int
    embedding: Floats | None = None
    truth: int | None = None
    text: bytes = b""


class LengthPredictor(Protocol):
    """Predicts the length of answers. Any thread may call it."""

    def predict(self, request: PredictionInput) -> int:
        """Predicted tokens of the answer, 1 to `max_new_tokens`; never blocks."""
        ...

    def predict_later(self, request: PredictionInput, then: Callable[[int], None]) -> None:
        """Call `then` with the prediction: at once, or soon on another thread where it takes time. Never blocks."""
        then(self.predict(request))

    def learn(self, request: PredictionInput, generated: int) -> None:
        """Report that the answer had `generated` tokens."""
        ...

    def close(self) -> None:
        """End the threads, if there are any; whoever waits for a prediction gets one."""
        return


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


class Regressor(LengthPredictor):
    """Ridge regression of the logarithm of the answer's length over the embedding and length of the prompt.

    `fallback` predicts for requests without an embedding, and learns from all requests.
    """

    def __init__(self, weights: Floats, fallback: LengthPredictor | None = None) -> None:
        """weights: [n + 2] for embeddings of n numbers; the last two: of log(1 + prompt tokens), and the constant."""
        require(weights.ndim == 1 and len(weights) > 2, "weights", weights.shape, "a vector of at least 3 numbers")
        require(bool(np.isfinite(weights).all()), "weights", "not all finite", "finite numbers")
        self._weights = weights
        self._fallback = fallback or RunningMean()

    @classmethod
    def train(
        cls, embeddings: Floats, prompt_tokens: Sequence[int], generated: Sequence[int], ridge: float = 1.0
    ) -> Regressor:
        """Fit to the embeddings [m, n] of m prompts, their lengths and the lengths of their answers, in tokens."""
        inputs = np.column_stack([embeddings, np.log1p(prompt_tokens)])
        mean, target = inputs.mean(axis=0), np.log1p(generated)
        centered = inputs - mean
        gram = centered.T @ centered + ridge * np.eye(inputs.shape[1])
        slopes = np.linalg.solve(gram, centered.T @ (target - target.mean()))
        return cls(np.append(slopes, target.mean() - mean @ slopes))

    @classmethod
    def load(cls, file: Path) -> Regressor:
        """Read the weights that `save` wrote. Raises InvalidInputError naming a file that is unreadable or invalid."""
        try:
            weights = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InvalidInputError("predictor_weights", str(file), f"a .npy file of weights ({error})") from None
        return cls(np.asarray(weights, np.float64))

    def save(self, file: Path) -> None:
        """Write the weights as a .npy file."""
        with file.open("wb") as output:
            np.save(output, self._weights, allow_pickle=False)

    def predict(self, request: PredictionInput) -> int:
        if request.embedding is None:
            return self._fallback.predict(request)
        width = len(self._weights) - 2
        require(request.embedding.shape == (width,), "embedding", request.embedding.shape, f"must be [{width}]")
        exponent = float(request.embedding @ self._weights[:-2] + np.log1p(request.prompt_tokens) * self._weights[-2])
        return _within(float(np.expm1(min(exponent + self._weights[-1], 50.0))), request)

    def learn(self, request: PredictionInput, generated: int) -> None:
        self._fallback.learn(request, generated)


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
