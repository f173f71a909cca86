"""The requests of `bench.token_adapt`: Table II's mix over traces as in Fig. 8."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from client.open_loop import Parameter, PlannedRequest
from shapeshift.token_adapt.request import Task
from shapeshift.workloads.arrivals import MAF_LIKE, format_states
from shapeshift.workloads.load import Load
from shapeshift.workloads.trace import Trace


def fluctuating(rate: float, seconds: float, seed: int) -> Trace:
    """Poisson arrivals whose rate is drawn anew each second; `rate` images a second on average."""
    return Load("fluctuating", rate, seconds, otas=True).draw(seed)


def bursty(rate: float, seconds: float, seed: int) -> Trace:
    """Calm with bursts; `rate` images a second on average over long runs."""
    return Load("mmpp", rate, seconds, format_states(MAF_LIKE), otas=True).draw(seed)


def accuracies(trace: Trace, tasks: Mapping[str, Task], gammas: Sequence[int]) -> NDArray[np.float64]:
    """[n, gammas]: the accuracy of each request's task."""
    return np.array([[tasks[name].accuracy[gamma] for gamma in gammas] for name in trace.task.tolist()])


def planned(trace: Trace, image_size: int) -> list[PlannedRequest]:
    """The requests for the server. All images are one JPEG of noise: an image's content does not change its time."""
    file = io.BytesIO()
    Image.effect_noise((image_size, image_size), 60).convert("RGB").save(file, "JPEG", quality=90)
    image = {"IMAGE": np.array([[file.getvalue()]], dtype=np.object_)}
    columns = trace.columns()
    names = ("task", "latency_ms", "utility")
    # Requests of one kind share their parameters, and are serialised once.
    parameters: dict[tuple[Parameter, ...], dict[str, Parameter]] = {}
    requests = []
    for at, *values in zip(trace.at_s.tolist(), *(columns[name].tolist() for name in names), strict=True):
        kind = parameters.setdefault(tuple(values), dict(zip(names, values, strict=True)))
        requests.append(PlannedRequest(at, image, kind))
    return requests
