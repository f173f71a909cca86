"""The packing factor: how many copies of a model run at once without slowing each other (Tabi, section 7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shapeshift.cascade.profiling.observation import ModelRunner
from shapeshift.engines.hardware import cores

# The longest median time of parallel copies over that of one alone.
MAX_SLOWDOWN = 1.1
_ROUNDS = 3


def factors(engines: Path, names: Sequence[str], texts: Sequence[Sequence[bytes]]) -> dict[str, int]:
    """The packing factor of each model, each copy on one thread; at most the machine's cores."""
    return {name: factor(engines, name, texts) for name in names}


def factor(engines: Path, name: str, texts: Sequence[Sequence[bytes]]) -> int:
    """The most copies whose median time is within MAX_SLOWDOWN of one alone."""
    models = [ModelRunner(engines, name) for _ in range(cores())]
    alone = _median_ms(models[:1], texts)
    for copies in range(2, len(models) + 1):
        if _median_ms(models[:copies], texts) > MAX_SLOWDOWN * alone:
            return copies - 1
    return len(models)


def _median_ms(models: Sequence[ModelRunner], texts: Sequence[Sequence[bytes]]) -> float:
    """The least of the rounds' medians, since other load on the machine only adds."""
    with ThreadPoolExecutor(len(models)) as pool:
        rounds = [list(pool.map(lambda model: _times(model, texts), models)) for _ in range(_ROUNDS)]
    return min(float(np.median(times)) for times in rounds)


def _times(model: ModelRunner, texts: Sequence[Sequence[bytes]]) -> list[float]:
    return [model.run_one(text)[1] for text in texts]
