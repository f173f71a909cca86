"""The requests of `bench.token_adapt`: Table II's mix over traces as in Fig. 8."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from client.open_loop import Parameter, PlannedRequest
from shapeshift.simulate.token_adapt import Load
from shapeshift.token_adapt.request import Task
from shapeshift.workloads import arrivals

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TABLE_II = (
    ("CIFAR10", 600.0, 0.3),
    ("CIFAR10", 1000.0, 0.01),
    ("CIFAR100", 600.0, 1.0),
    ("CIFAR100", 1000.0, 0.2),
    ("EuroSAT", 600.0, 0.3),
    ("EuroSAT", 1000.0, 0.01),
)
"""The paper's query types, all equally frequent: data set, latency requirement in ms, utility."""
_LEAST, _MOST = 200 / 450, 700 / 450
"""Fig. 8a: 200 to 700 requests in a second."""
_BURSTS = arrivals.parse_states("0.45:8,2.2:3")
"""Like Fig. 8b: calm for most of the time, with bursts of seconds at five times the rate."""


@dataclass(frozen=True)
class Traffic:
    """Requests of one image. at_s: arrivals; kind: rows of TABLE_II."""

    at_s: Floats
    kind: Integers


def fluctuating(rate: float, seconds: float, seed: int) -> Traffic:
    """Poisson arrivals whose rate is drawn anew each second; `rate` images a second on average."""
    rng = np.random.default_rng(seed)
    rates = rng.uniform(_LEAST, _MOST, int(np.ceil(seconds)))
    rates *= rate / rates.mean()
    parts = [second + rng.uniform(0, 1, rng.poisson(each)) for second, each in enumerate(rates.tolist())]
    return _mixed(np.sort(np.concatenate(parts)), rng)


def bursty(rate: float, seconds: float, seed: int) -> Traffic:
    """Calm with bursts; `rate` images a second on average over long runs."""
    rng = np.random.default_rng(seed)
    return _mixed(arrivals.mmpp(rate, seconds, rng, _BURSTS), rng)


def _mixed(at_s: Floats, rng: np.random.Generator) -> Traffic:
    return Traffic(at_s, rng.integers(0, len(TABLE_II), len(at_s)))


def utilities(traffic: Traffic) -> Floats:
    """The utility of each request."""
    return np.array([utility for _, _, utility in TABLE_II])[traffic.kind]


def required_ms(traffic: Traffic) -> Floats:
    """The latency requirement of each request."""
    return np.array([latency_ms for _, latency_ms, _ in TABLE_II])[traffic.kind]


def accuracies(traffic: Traffic, tasks: Mapping[str, Task], gammas: Sequence[int]) -> Floats:
    """[n, gammas]: the accuracy of each request's task."""
    rows = np.array([[tasks[name].accuracy[gamma] for gamma in gammas] for name, _, _ in TABLE_II])
    return rows[traffic.kind]


def simulated(traffic: Traffic, tasks: Mapping[str, Task], gammas: Sequence[int]) -> Load:
    """The traffic for the simulation."""
    return Load(traffic.at_s * 1e3, required_ms(traffic), utilities(traffic), accuracies(traffic, tasks, gammas))


def planned(traffic: Traffic, image_size: int) -> list[PlannedRequest]:
    """The traffic for the server. All images are one JPEG of noise: an image's content does not change its time."""
    file = io.BytesIO()
    Image.effect_noise((image_size, image_size), 60).convert("RGB").save(file, "JPEG", quality=90)
    image = {"IMAGE": np.array([[file.getvalue()]], dtype=np.object_)}
    parameters: list[dict[str, Parameter]] = [
        {"task": name, "latency_ms": latency_ms, "utility": utility} for name, latency_ms, utility in TABLE_II
    ]
    rows = zip(traffic.at_s.tolist(), traffic.kind.tolist(), strict=True)
    return [PlannedRequest(at, image, parameters[kind]) for at, kind in rows]
