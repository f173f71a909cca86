"""The cells of `bench.token_adapt`: several schemes under one load, and what became of each one's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor

from bench.foreign import ForeignLoad
from bench.token_loads import Traffic, accuracies, planned, required_ms, worth
from bench.token_systems import Scheme
from client.open_loop import replay
from client.report import Report
from shapeshift.token_adapt.interfaces import ImageModel

_OUTPUTS = ("GAMMA", "BATCH_SIZE", "OUTCOME")
_TIMEOUT_S = 60.0
NEVER_RUN = -999
"""Stands for the gamma of an image that was not executed."""


@dataclass(frozen=True)
class Cell:
    """What became of one scheme's requests after the warm-up, by image.

    at_s, worth: when it came, what it is worth; accuracy: its task's at the gamma that served it, 0 where none did;
    gamma, batch; in_time: answered within its requirement by the client's clock; failed: requests with an error
    """

    load: str
    scheme: str
    seed: int
    at_s: NDArray[np.float64]
    worth: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    gamma: NDArray[np.int64]
    batch: NDArray[np.int64]
    in_time: NDArray[np.bool_]
    failed: int
    foreign: float

    @property
    def gained(self) -> NDArray[np.float64]:
        """The utility that each image brings in expectation."""
        return self.worth * self.accuracy * self.in_time

    @property
    def share(self) -> float:
        """The utility gained, of all that was offered."""
        return float(self.gained.sum() / self.worth.sum())

    @property
    def types(self) -> tuple[float, float, float, float]:
        """The paper's four: in time and accurate, in time and not, late, evicted."""
        count = len(self.worth)
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
    usual: ImageModel,
    warm_up_s: float,
) -> list[Cell]:
    """Send the same requests to the models of all `schemes` at once."""
    requests = planned(traffic, usual.tasks, usual.image_size)

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
        _cell(load, scheme, seed, traffic, report, scheme.model or usual, warm_up_s, foreign.cores)
        for scheme, report in zip(schemes, reports, strict=True)
    ]


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
    images = traffic.images
    answers = [read(answer, images) for answer in report.answers]
    gammas, batches, timely = (np.concatenate(column) for column in zip(*answers, strict=True))
    known = accuracies(traffic, model.tasks, model.gammas)
    place = {gamma: index for index, gamma in enumerate(model.gammas)}
    accuracy = np.array(
        [known[row // images, place[gamma]] if gamma in place else 0.0 for row, gamma in enumerate(gammas.tolist())]
    )
    answered = np.nan_to_num(report.latency_s, nan=np.inf) * 1e3 <= required_ms(traffic)
    counted = np.repeat(traffic.at_s >= warm_up_s, images)
    return Cell(
        load=load,
        scheme=scheme.name,
        seed=seed,
        at_s=np.repeat(traffic.at_s, images)[counted],
        worth=np.repeat(worth(traffic), images)[counted],
        accuracy=accuracy[counted],
        gamma=gammas[counted],
        batch=batches[counted],
        in_time=(timely & np.repeat(answered, images))[counted],
        failed=int((~report.ok)[traffic.at_s >= warm_up_s].sum()),
        foreign=foreign,
    )


def read(answer: bytes | None, images: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Of a serialised answer to `images` images: gamma, batch size and whether it was in time, of each.

    The gamma is NEVER_RUN where an image was not executed, or the answer is missing.
    """
    if answer is None:
        return np.full(images, NEVER_RUN), np.zeros(images, np.int64), np.zeros(images, np.bool_)
    message = service_pb2.ModelInferResponse.FromString(answer)
    raw: Mapping[str, bytes] = {
        output.name: content for output, content in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    outcomes = deserialize_bytes_tensor(raw["OUTCOME"])
    gammas, batches = (np.frombuffer(raw[name], np.int32).astype(np.int64) for name in ("GAMMA", "BATCH_SIZE"))
    return np.where(outcomes == b"evicted", NEVER_RUN, gammas), batches, outcomes == b"in_time"
