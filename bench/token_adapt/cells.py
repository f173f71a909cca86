"""The cells of `bench.token_adapt`: several schemes under one load, and the outcome of each image."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from bench.common.cells import Cells, Run
from bench.common.foreign_load import ForeignLoad
from bench.common.output import Row
from bench.token_adapt.loads import accuracies, planned
from bench.token_adapt.systems import OURS, Scheme
from client.open_loop import replay
from client.report import Report
from shapeshift.simulate.outcome import in_time
from shapeshift.token_adapt.executor import ImageModel
from shapeshift.workloads.trace import Trace

_OUTPUTS = ("GAMMA", "BATCH_SIZE", "OUTCOME")
_TIMEOUT_S = 60.0
NEVER_RUN = -999
"""The gamma of an image that was not executed."""


@dataclass(frozen=True)
class Images:
    """The outcome of one scheme's images after the warm-up; arrays are [images].

    utility: the value of an answer in time. accuracy: its task's at the gamma that served it, 0 where none did. batch:
    images of its batch. in_time: answered within its requirement by the client's clock. failed: requests with an error.
    """

    utility: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    gamma: NDArray[np.int64]
    batch: NDArray[np.int64]
    in_time: NDArray[np.bool_]
    failed: int


def figures(run: Run[Images]) -> dict[str, float]:
    """utility: the share of the offered utility that was gained; right to evicted: shares of the paper's four types of
    images; batch: the mean size; gamma: the mean of the images that ran."""
    images, count = run.result, len(run.result.utility)
    ran = images.gamma != NEVER_RUN
    right, timely = float((images.accuracy * images.in_time).sum()), int(images.in_time.sum())
    late, sizes = int((ran & ~images.in_time).sum()), images.batch[ran]
    gained = images.utility * images.accuracy * images.in_time
    return {
        "utility": round(float(gained.sum() / images.utility.sum()), 4),
        "right": round(right / count, 4),
        "wrong": round((timely - right) / count, 4),
        "late": round(late / count, 4),
        "evicted": round((count - timely - late) / count, 4),
        "failed": images.failed,
        "batch": round(len(sizes) / float((1.0 / sizes).sum()), 1) if len(sizes) else 0.0,
        "gamma": round(float(images.gamma[ran].mean()), 1) if len(sizes) else 0.0,
    }


def ratios(cells: Cells[Images]) -> list[Row]:
    """The utility of ours over that of each other scheme; the best fixed gamma is named so."""
    rows: list[Row] = []
    for load in cells.loads:
        fixed = [name for name in cells.systems(load) if name.startswith("gamma ")]
        best = max(fixed, key=lambda name: cells.figure(load, name, "utility"), default="")
        for scheme in [name for name in cells.systems(load) if name != OURS.name]:
            over = f"{scheme}, the best fixed one" if scheme == best else scheme
            rows.append({"load": load, "over": over, "ratio": cells.over(load, OURS.name, scheme, "utility")})
    return rows


def run(
    cells: Cells[Images],
    url: str,
    load: str,
    trace: Trace,
    schemes: Sequence[Scheme],
    default: ImageModel,
    warm_up_s: float,
) -> None:
    """Send the same requests to the models of all `schemes` at once; `default` is the model of those without one."""
    requests = planned(trace, default.preprocessing.size)

    async def all_of() -> list[Report]:
        options = {"outputs": _OUTPUTS, "timeout_s": _TIMEOUT_S, "max_in_flight": 100_000, "keep_answers": True}
        return await asyncio.gather(*[replay(url, scheme.slug, requests, **options) for scheme in schemes])  # type: ignore[arg-type]

    with ForeignLoad() as foreign:
        reports = asyncio.run(all_of())
    for scheme, report in zip(schemes, reports, strict=True):
        images = _images(trace, report, scheme.model or default, warm_up_s)
        cells.keep(load, scheme.name, Run(images, foreign.cores, foreign.own_s))


def _images(trace: Trace, report: Report, model: ImageModel, warm_up_s: float) -> Images:
    gammas, batches, timely = (np.array(column) for column in zip(*map(read, report.answers), strict=True))
    by_gamma = accuracies(trace, model.tasks, model.gammas)
    columns = {gamma: index for index, gamma in enumerate(model.gammas)}
    accuracy = np.array(
        [by_gamma[row, columns[gamma]] if gamma in columns else 0.0 for row, gamma in enumerate(gammas.tolist())]
    )
    answered = in_time(report.latency_s * 1e3, trace)
    counted = trace.at_s >= warm_up_s
    return Images(
        utility=trace.utility[counted],
        accuracy=accuracy[counted],
        gamma=gammas[counted],
        batch=batches[counted],
        in_time=(timely & answered)[counted],
        failed=int((~report.ok)[counted].sum()),
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
