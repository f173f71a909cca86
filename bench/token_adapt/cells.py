"""The cells of `bench.token_adapt`: several schemes under one load, and the outcome of each image."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from bench.common.foreign_load import ForeignLoad
from bench.common.systems import closed_loop
from bench.token_adapt.loads import Traffic, accuracies, planned, required_ms, utilities
from bench.token_adapt.systems import Scheme
from client.open_loop import replay, serialise
from client.report import Report
from shapeshift.token_adapt.interfaces import ImageModel

_OUTPUTS = ("GAMMA", "BATCH_SIZE", "OUTCOME")
_TIMEOUT_S = 60.0
# Closed loops of a capacity measurement: how many, unmeasured seconds, latency requirement of their requests.
_LOOPS, _WARM_UP_S, _PATIENT_MS = 16, 1.0, 60_000.0
NEVER_RUN = -999
"""The gamma of an image that was not executed."""


@dataclass(frozen=True)
class Cell:
    """The outcome of one scheme's images after the warm-up; arrays are [images].

    at_s, utility: arrival, and the value of an answer in time. accuracy: its task's at the gamma that served it, 0
    where none did. batch: images of its batch. in_time: answered within its requirement by the client's clock.
    failed: requests with an error. foreign: cores that other processes used.
    """

    load: str
    scheme: str
    seed: int
    at_s: NDArray[np.float64]
    utility: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    gamma: NDArray[np.int64]
    batch: NDArray[np.int64]
    in_time: NDArray[np.bool_]
    failed: int
    foreign: float

    @property
    def gained(self) -> NDArray[np.float64]:
        """The expected utility of each image."""
        return self.utility * self.accuracy * self.in_time

    @property
    def share(self) -> float:
        """The share of the offered utility that was gained."""
        return float(self.gained.sum() / self.utility.sum())

    @property
    def types(self) -> tuple[float, float, float, float]:
        """Shares of the paper's four types: in time and right, in time and wrong, late, evicted."""
        count = len(self.utility)
        ran = self.gamma != NEVER_RUN
        right = float((self.accuracy * self.in_time).sum())
        timely = int(self.in_time.sum())
        late = int((ran & ~self.in_time).sum())
        return right / count, (timely - right) / count, late / count, (count - timely - late) / count


def run(
    url: str,
    load: str,
    seed: int,
    traffic: Traffic,
    schemes: Sequence[Scheme],
    default: ImageModel,
    warm_up_s: float,
) -> list[Cell]:
    """Send the same requests to the models of all `schemes` at once; `default` is the model of those without one."""
    requests = planned(traffic, default.tasks, default.preprocessing.size)

    async def all_of() -> list[Report]:
        names = [scheme.slug for scheme in schemes]
        return await asyncio.gather(
            *[
                replay(
                    url,
                    name,
                    requests,
                    outputs=_OUTPUTS,
                    timeout_s=_TIMEOUT_S,
                    max_in_flight=100_000,
                    keep_answers=True,
                )
                for name in names
            ]
        )

    with ForeignLoad() as foreign:
        reports = asyncio.run(all_of())
    return [
        _cell(load, scheme, seed, traffic, report, scheme.model or default, warm_up_s, foreign.cores)
        for scheme, report in zip(schemes, reports, strict=True)
    ]


def measure_capacity(url: str, name: str, model: ImageModel, seconds: float) -> float:
    """Images a second that `model` serves in closed loops without time pressure."""
    request = planned(Traffic(np.zeros(1), np.zeros(1, np.int64)), model.tasks, model.preprocessing.size)[0]
    patient = replace(request, parameters={**request.parameters, "latency_ms": _PATIENT_MS})
    message = serialise(name, [patient], ("OUTCOME",))[0]
    start = time.monotonic() + _WARM_UP_S
    end = start + seconds
    _, answered = asyncio.run(closed_loop(url, [message], _LOOPS, lambda _: time.monotonic() < end)).T
    return float(((answered >= start) & (answered < end)).sum() / seconds)


def _cell(
    load: str,
    scheme: Scheme,
    seed: int,
    traffic: Traffic,
    report: Report,
    model: ImageModel,
    warm_up_s: float,
    foreign: float,
) -> Cell:
    gammas, batches, timely = (np.array(column) for column in zip(*map(read, report.answers), strict=True))
    by_gamma = accuracies(traffic, model.tasks, model.gammas)
    columns = {gamma: index for index, gamma in enumerate(model.gammas)}
    accuracy = np.array(
        [by_gamma[row, columns[gamma]] if gamma in columns else 0.0 for row, gamma in enumerate(gammas.tolist())]
    )
    answered = np.nan_to_num(report.latency_s, nan=np.inf) * 1e3 <= required_ms(traffic)
    counted = traffic.at_s >= warm_up_s
    return Cell(
        load=load,
        scheme=scheme.name,
        seed=seed,
        at_s=traffic.at_s[counted],
        utility=utilities(traffic)[counted],
        accuracy=accuracy[counted],
        gamma=gammas[counted],
        batch=batches[counted],
        in_time=(timely & answered)[counted],
        failed=int((~report.ok)[counted].sum()),
        foreign=foreign,
    )


def read(answer: bytes | None) -> tuple[int, int, bool]:
    """The gamma, the batch size and whether it was in time, of a serialised answer.

    The gamma is NEVER_RUN for an image that was not executed, or whose answer is missing.
    """
    if answer is None:
        return NEVER_RUN, 0, False
    message = service_pb2.ModelInferResponse.FromString(answer)
    raw: Mapping[str, bytes] = {
        output.name: content for output, content in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    (outcome,) = deserialize_bytes_tensor(raw["OUTCOME"]).tolist()
    gamma, batch = (int(np.frombuffer(raw[name], np.int32)[0]) for name in ("GAMMA", "BATCH_SIZE"))
    return NEVER_RUN if outcome == b"evicted" else gamma, batch, outcome == b"in_time"
