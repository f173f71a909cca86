"""What a model of `bench.token_adapt` serves in closed loops: the capacity that its rates are shares of."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np

from bench.loads import ask_closed
from bench.token_loads import Traffic, planned
from client.open_loop import serialise
from shapeshift.token_adapt.interfaces import ImageModel

_LOOPS = 16
_WARM_UP_S = 1.0
_PATIENT_MS = 60_000.0


def served(url: str, name: str, model: ImageModel, images: int, seconds: float) -> float:
    """Images a second of requests of `images` images that nothing hurries, after a second of warm-up."""
    usual = planned(Traffic(np.zeros(1), np.zeros(1, np.int64), images), model.tasks, model.image_size)[0]
    patient = replace(usual, parameters={**usual.parameters, "latency_ms": _PATIENT_MS})
    message = serialise(name, [patient], ("OUTCOME",))[0]
    begin = time.monotonic() + _WARM_UP_S
    end = begin + seconds
    _, answered = asyncio.run(ask_closed(url, [message], _LOOPS, lambda _: time.monotonic() < end)).T
    return float(((answered >= begin) & (answered < end)).sum() * images / seconds)
