"""How long answers will be (Chameleon, section 4: an existing predictor is taken; here are three)."""

from __future__ import annotations

import threading
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
"""Answers after which an older one counts for less than 1/e in a running mean."""
MOST_ADAPTERS = 4096


@dataclass(frozen=True)
class Asked:
    """What is known of a request before it runs.

    embedding  of the prompt, [n]; None where it was not computed
    truth      tokens that the answer will have; known in experiments alone
    """

    adapter: str | None
    prompt_tokens: int
    max_new_tokens: int
    embedding: Floats | None = None
    truth: int | None = None


class Predictor(Protocol):
    """Any thread may call it."""

    def predict(self, asked: Asked) -> int:
        """Tokens of the answer, 1 to `max_new_tokens`."""
        ...

    def learn(self, asked: Asked, generated: int) -> None:
        """The answer had `generated` tokens."""
        ...


class RunningMean:
    """The mean over an adapter's answers of late; over all answers for an adapter that has had none yet.

    Before any answer: `max_new_tokens`.
    """

    def __init__(self, memory: int = MEMORY, most_adapters: int = MOST_ADAPTERS) -> None:
        require(memory >= 1, "memory", memory, "at least 1")
        require(most_adapters >= 1, "most_adapters", most_adapters, "at least 1")
        self._memory = memory
        self._most = most_adapters
        self._means: OrderedDict[str | None, tuple[int, float]] = OrderedDict()
        self._all = (0, 0.0)
        self._lock = threading.Lock()

    def predict(self, asked: Asked) -> int:
        count, mean = self._means.get(asked.adapter, self._all)
        return _within(mean if count else asked.max_new_tokens, asked)

    def learn(self, asked: Asked, generated: int) -> None:
        with self._lock:
            self._means[asked.adapter] = self._moved(self._means.get(asked.adapter, (0, 0.0)), generated)
            self._means.move_to_end(asked.adapter)
            if len(self._means) > self._most:
                self._means.popitem(last=False)
            self._all = self._moved(self._all, generated)

    def _moved(self, known: tuple[int, float], value: int) -> tuple[int, float]:
        count = min(known[0] + 1, self._memory)
        return count, known[1] + (value - known[1]) / count


class Regressor:
    """Ridge regression of the answer's length, as a logarithm, over the prompt's embedding and length.

    A request without an embedding is predicted by `fallback`, which learns from all.
    """

    def __init__(self, weights: Floats, fallback: Predictor | None = None) -> None:
        """weights: [n + 2] for embeddings of n numbers; the last two: of log(1 + prompt tokens), and the constant."""
        require(weights.ndim == 1 and len(weights) > 2, "weights", weights.shape, "a vector of at least 3 numbers")
        require(bool(np.isfinite(weights).all()), "weights", "not all finite", "finite numbers")
        self._weights = weights
        self._fallback = fallback or RunningMean()

    @classmethod
    def train(
        cls, embeddings: Floats, prompt_tokens: Sequence[int], generated: Sequence[int], ridge: float = 1.0
    ) -> Regressor:
        """From embeddings [m, n] of m prompts, their tokens, and those of their answers."""
        inputs = np.column_stack([embeddings, np.log1p(prompt_tokens)])
        middle, target = inputs.mean(axis=0), np.log1p(generated)
        around = inputs - middle
        square = around.T @ around + ridge * np.eye(inputs.shape[1])
        slopes = np.linalg.solve(square, around.T @ (target - target.mean()))
        return cls(np.append(slopes, target.mean() - middle @ slopes))

    @classmethod
    def load(cls, file: Path) -> Regressor:
        """As saved. Raises InvalidInputError naming a file that cannot be read or holds something else."""
        try:
            weights = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InvalidInputError("predictor", str(file), f"a .npy file of weights ({error})") from None
        return cls(np.asarray(weights, np.float64))

    def save(self, file: Path) -> None:
        with file.open("wb") as output:
            np.save(output, self._weights, allow_pickle=False)

    def predict(self, asked: Asked) -> int:
        if asked.embedding is None:
            return self._fallback.predict(asked)
        width = len(self._weights) - 2
        require(asked.embedding.shape == (width,), "embedding", asked.embedding.shape, f"must be [{width}]")
        exponent = float(asked.embedding @ self._weights[:-2] + np.log1p(asked.prompt_tokens) * self._weights[-2])
        return _within(float(np.expm1(min(exponent + self._weights[-1], 50.0))), asked)

    def learn(self, asked: Asked, generated: int) -> None:
        self._fallback.learn(asked, generated)


class Oracle:
    """For experiments: the truth for a share `accuracy` of the requests, any length for the others.

    A wrong one is drawn as evenly in its logarithm as lengths come.
    """

    def __init__(self, accuracy: float, seed: int = 0) -> None:
        require(0 <= accuracy <= 1, "accuracy", accuracy, "0 to 1")
        self._accuracy = accuracy
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def predict(self, asked: Asked) -> int:
        require(asked.truth is not None, "truth", asked.truth, "the tokens that the answer will have")
        assert asked.truth is not None
        with self._lock:
            right, wrong = self._rng.random(), self._rng.random()
        return _within(asked.truth if right < self._accuracy else asked.max_new_tokens**wrong, asked)

    def learn(self, asked: Asked, generated: int) -> None:
        """It knows already."""


def _within(tokens: float, asked: Asked) -> int:
    return max(1, min(round(tokens), asked.max_new_tokens))
