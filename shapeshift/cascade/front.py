"""The front of a cascade: Triton requests in, labels out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.cascade.candidates.registry import LAYOUT, ServingCandidate
from shapeshift.cascade.candidates.table import CandidateTable
from shapeshift.cascade.first_level import FirstLevel
from shapeshift.cascade.hot_swap import HotSwap
from shapeshift.cascade.level_client import LevelClient
from shapeshift.cascade.metrics import CascadeMetrics
from shapeshift.cascade.request import ClassifyRequest
from shapeshift.cascade.service import CascadeService
from shapeshift.cascade.settings import CascadeSettings, GeneratedCascadeSettings
from shapeshift.errors import CancelledRequestError, InvalidInputError
from shapeshift.registry_mirror.follower import GeneratedRegistrySettings, RegistrySettings, follow
from shapeshift.serving import description
from shapeshift.serving.description import Description
from shapeshift.serving.front import Client, Front
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Gauge, Metric, RequestMetrics
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils
from shapeshift.serving.text_inputs import NUM_TOKENS, TEXT_PAIR, texts_of_request, wanted_outputs
from shapeshift.triton.async_client import AsyncClient
from shapeshift.triton.endpoint import own_endpoint

_PARAMETERS = settings.names(CascadeSettings, GeneratedCascadeSettings, RegistrySettings, GeneratedRegistrySettings)
# The longest text that the length histogram tells apart.
_MAX_LENGTH = 512


class CascadeFront(Front[ClassifyRequest]):
    """Has texts classified by a small model, and by larger ones where that is not sure."""

    takes = ("truncate", "level", "min_accuracy")

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, client: AsyncClient | None = None) -> None:
        super().__init__(pb_utils, args)
        settings.refuse_unknown(args.parameters, _PARAMETERS)
        own = settings.read(CascadeSettings, args.parameters)
        generated = settings.read(GeneratedCascadeSettings, args.parameters)
        if not generated.engines_dir:
            raise InvalidInputError("engines_dir", "", "the folder of all models' engines; run `shapeshift engines`")
        for name in args.outputs:
            if name not in _OUTPUTS:
                raise InvalidInputError("output", name, f"one of {', '.join(_OUTPUTS)}")
        self._pairs = TEXT_PAIR in args.inputs
        self._cascade_metrics = CascadeMetrics()
        server = own_endpoint(own.grpc_url)
        self._client = LevelClient(client or AsyncClient(server.address, server.tls), own)
        engines = (args.folder / generated.engines_dir).resolve()

        def open_service(serving: ServingCandidate) -> CascadeService:
            self._check_pairs(serving.table)
            return CascadeService(serving, engines, own, self._client, self._cascade_metrics, self.log, args.device)

        folder = (args.folder / own.candidates_dir).resolve()
        self._follower = follow(args.parameters, folder, LAYOUT, self.log)
        self._hot_swap = HotSwap(folder, own, open_service, self._client, self._cascade_metrics, self.log)
        self.begin(RequestMetrics("texts", _MAX_LENGTH, own.slo_ms))
        self.log(f"ready: task {own.task}, candidate {self._hot_swap.current.candidate.name}")

    def parse(self, request: InferenceRequest, given: RequestParameters, client: Client) -> ClassifyRequest:
        texts = texts_of_request(self.pb_utils, request, self._pairs)
        return ClassifyRequest(client, texts, wanted_outputs(request, self.args.outputs), given, self.done)

    def start(self, job: ClassifyRequest) -> None:
        for tokens in self._hot_swap.submit(job):
            self.request_metrics.lengths.observe(tokens)

    def cancel(self, job: ClassifyRequest) -> None:
        job.fail(CancelledRequestError("the caller cancelled the request"))

    def respond(self, job: ClassifyRequest) -> InferenceResponse:
        return self.response({name: _OUTPUTS[name](job) for name in job.outputs})

    def answered(self, job: ClassifyRequest) -> None:
        for row in job.rows:
            self._cascade_metrics.count_row(row, job.level is not None)

    def describe(self) -> Description:
        serving = self._hot_swap.current
        return Description(
            description.TEXT_CLASSIFICATION,
            precision=serving.first_level.precision,
            max_tokens=serving.first_level.max_tokens,
            labels=serving.table.labels,
            pairs=self._pairs,
            tasks=[serving.table.task],
            levels=serving.candidate.levels,
            engines=description.engines_version(serving.first_level.manifest_sha256),
            registry=description.registry_version({serving.candidate.name: serving.table.as_json()}),
        )

    def load(self) -> float:
        executor = self._first_level.executor
        return executor.waiting + executor.running

    def metrics(self) -> Sequence[Metric]:
        return [
            Gauge(
                "requests_waiting", "Texts that wait for the first level", lambda: self._first_level.executor.waiting
            ),
            Gauge("requests_running", "Texts that it computes", lambda: self._first_level.executor.running),
            *self._cascade_metrics.exported(),
            *self._client.metrics(),
            *self._follower.metrics,
        ]

    def steps(self) -> Sequence[StepCounter]:
        return self._first_level.executor.steps

    def stop(self) -> None:
        self._follower.close()
        self._hot_swap.close()
        self._client.close()

    @property
    def _first_level(self) -> FirstLevel:
        return self._hot_swap.current.first_level

    def _check_pairs(self, table: CandidateTable) -> None:
        if table.pairs != self._pairs:
            inputs = "pairs" if table.pairs else "single texts"
            allowed = f"{'listed' if table.pairs else 'not listed'}: candidates of task {table.task} classify {inputs}"
            raise InvalidInputError(f"input {TEXT_PAIR}", "listed" if self._pairs else "not listed", allowed)


def _label(request: ClassifyRequest) -> Any:
    table = request.control.table
    if table.is_regression:
        names = [f"{float(row.final.probabilities[0]):.6g}" for row in request.rows]
    else:
        names = [table.labels[int(row.final.probabilities.argmax())] for row in request.rows]
    return np.array([[name.encode()] for name in names], dtype=object)


def _column(values: list[float], kind: type) -> Any:
    return np.array(values, dtype=kind)[:, None]


_OUTPUTS: dict[str, Callable[[ClassifyRequest], Any]] = {
    "LABEL": _label,
    "PROBABILITIES": lambda request: np.stack([row.final.probabilities for row in request.rows]).astype(np.float32),
    "CONFIDENCE": lambda request: _column([row.final.confidence for row in request.rows], np.float32),
    "LEVEL": lambda request: _column([row.final.level for row in request.rows], np.int32),
    "WORDS_PRUNED": lambda request: _column([row.words_pruned for row in request.rows], np.int32),
    "ENGINE_MS": lambda request: _column([row.engine_ms for row in request.rows], np.float32),
    "CONTROL_MS": lambda request: _column([row.control_ms for row in request.rows], np.float32),
    NUM_TOKENS.name: lambda request: _column([row.num_tokens for row in request.rows], np.int32),
}
