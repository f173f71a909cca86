"""How many copies of a model run at once before each takes longer: the packing factor (Tabi, section 7.1)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shapeshift.cascade.observe import ProfiledModel
from shapeshift.engines.hardware import cores

# Copies that take this much longer than one alone are too many.
MOST_SLOWER = 1.1
_ROUNDS = 3


def factors(engines: Path, names: Sequence[str], texts: Sequence[Sequence[bytes]]) -> dict[str, int]:
    """The packing factor of each model, each copy on one thread; at most the machine's cores."""
    return {name: factor(engines, name, texts) for name in names}


def factor(engines: Path, name: str, texts: Sequence[Sequence[bytes]]) -> int:
    """The most copies whose median time is within MOST_SLOWER of one alone."""
    models = [ProfiledModel(engines, name) for _ in range(cores())]
    alone = _median_ms(models[:1], texts)
    for copies in range(2, len(models) + 1):
        if _median_ms(models[:copies], texts) > MOST_SLOWER * alone:
            return copies - 1
    return len(models)


def _median_ms(models: Sequence[ProfiledModel], texts: Sequence[Sequence[bytes]]) -> float:
    """Of the rounds the least, as other work on the machine only adds."""
    with ThreadPoolExecutor(len(models)) as pool:
        rounds = [list(pool.map(lambda model: _times(model, texts), models)) for _ in range(_ROUNDS)]
    return min(float(np.median(times)) for times in rounds)


def _times(model: ProfiledModel, texts: Sequence[Sequence[bytes]]) -> list[float]:
    return [model.one(text)[1] for text in texts]
