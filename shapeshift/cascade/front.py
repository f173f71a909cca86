"""The front of a cascade: Triton requests in, labels out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
from shapeshift.errors import InvalidInputError
from shapeshift.fleet.forwarding.front import Front, open_entry
from shapeshift.registry_mirror.follower import GeneratedRegistrySettings, RegistrySettings, follow
from shapeshift.serving import description, parameters
from shapeshift.serving.description import Description, describing
from shapeshift.serving.liveness import Liveness, StepCounter
from shapeshift.serving.metrics import Gauge, Metric, MetricsFlusher, RequestMetrics
from shapeshift.serving.model_args import ModelArgs, model_log
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender, Returned
from shapeshift.serving.responses import Responder
from shapeshift.serving.text_inputs import NUM_TOKENS, TEXT_PAIR, texts_of_request, wanted_outputs
from shapeshift.triton.async_client import AsyncClient
from shapeshift.triton.settings import own_endpoint

_PARAMETERS = settings.names(CascadeSettings, GeneratedCascadeSettings, RegistrySettings, GeneratedRegistrySettings)
_OWN_PARAMETERS = ("truncate", "level", "min_accuracy")
# The longest text that the length histogram tells apart.
_MAX_LENGTH = 512


class CascadeFront:
    """Owns the process' threads. `execute` never blocks and never raises; every request is answered once."""

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, client: AsyncClient | None = None) -> None:
        self._pb_utils = pb_utils
        self._log = model_log(pb_utils, args.name)
        settings.refuse_unknown(args.parameters, _PARAMETERS)
        own = settings.read(CascadeSettings, args.parameters)
        generated = settings.read(GeneratedCascadeSettings, args.parameters)
        if not generated.engines_dir:
            raise InvalidInputError("engines_dir", "", "the folder of all models' engines; run `shapeshift engines`")
        for name in args.outputs:
            if name not in _OUTPUTS:
                raise InvalidInputError("output", name, f"one of {', '.join(_OUTPUTS)}")
        self._outputs = args.outputs
        self._pairs = TEXT_PAIR in args.inputs
        self._cascade_metrics = CascadeMetrics()
        server = own_endpoint(own.grpc_url)
        self._client = LevelClient(client or AsyncClient(server.address, server.tls), own)
        engines = (args.folder / generated.engines_dir).resolve()

        def open_service(serving: ServingCandidate) -> CascadeService:
            self._check_pairs(serving.table)
            return CascadeService(serving, engines, own, self._client, self._cascade_metrics, self._log, args.device)

        folder = (args.folder / own.candidates_dir).resolve()
        self._follower = follow(args.parameters, folder, LAYOUT, self._log)
        self._hot_swap = HotSwap(folder, own, open_service, self._client, self._cascade_metrics, self._log)
        self._request_metrics = RequestMetrics("texts", _MAX_LENGTH, own.slo_ms)
        self._responder = Responder(pb_utils, self._request_metrics, self._log)
        self._entry = open_entry(
            Front(pb_utils, args, self._responder, self._log, self._submit, self._describe, self._load)
        )
        self._enter = describing(pb_utils, self._responder, args, self._entry.describe, self._entry.submit)
        self._export_metrics(args.name)
        self._log(f"ready: task {own.task}, candidate {self._hot_swap.current.candidate.name}")

    def execute(self, requests: Sequence[InferenceRequest]) -> Returned:
        """Start every request; an invalid one is answered with its error at once."""
        return self._responder.start(requests, self._enter)

    def close(self) -> None:
        """Stop producers before consumers: what other nodes serve, the levels, then the responses, then the metrics."""
        self._entry.close()
        self._follower.close()
        self._hot_swap.close()
        self._client.close()
        self._responder.close()
        self._metrics.close()

    def _check_pairs(self, table: CandidateTable) -> None:
        if table.pairs != self._pairs:
            inputs = "pairs" if table.pairs else "single texts"
            allowed = f"{'listed' if table.pairs else 'not listed'}: candidates of task {table.task} classify {inputs}"
            raise InvalidInputError(f"input {TEXT_PAIR}", "listed" if self._pairs else "not listed", allowed)

    def _describe(self) -> Description:
        serving = self._hot_swap.current
        return Description(
            description.TEXT_CLASSIFICATION,
            precision=serving.first_level.precision,
            max_tokens=serving.first_level.max_tokens,
            labels=serving.table.labels,
            pairs=self._pairs,
            only_pairs=self._pairs or None,
            tasks=[serving.table.task],
            levels=serving.candidate.levels,
            engines=description.engines_version(serving.first_level.manifest_sha256),
            registry=description.registry_version({serving.candidate.name: serving.table.as_json()}),
        )

    def _submit(self, request: InferenceRequest, sender: ResponseSender) -> None:
        given = parameters.parse(request.parameters(), _OWN_PARAMETERS)
        texts = texts_of_request(self._pb_utils, request, self._pairs)
        outputs = wanted_outputs(request, self._outputs)
        for tokens in self._hot_swap.submit(texts, given, partial(self._respond, sender, outputs)):
            self._request_metrics.lengths.observe(tokens)

    def _respond(self, sender: ResponseSender, outputs: list[str], request: ClassifyRequest) -> None:
        if request.error is not None:
            self._responder.fail(sender, request.error)
            return
        make = partial(self._response, request, outputs)
        self._responder.send(sender, make, request.arrived, partial(self._count_rows, request))

    def _response(self, request: ClassifyRequest, outputs: list[str]) -> InferenceResponse:
        tensors = [self._pb_utils.Tensor(name, _OUTPUTS[name](request)) for name in outputs]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _count_rows(self, request: ClassifyRequest) -> None:
        for row in request.rows:
            self._cascade_metrics.count_row(row, request.level is not None)

    def _steps(self) -> list[StepCounter]:
        executor = self._hot_swap.current.first_level.executor
        return [*self._responder.steps, *self._entry.steps, *executor.steps]

    def _load(self) -> float:
        executor = self._hot_swap.current.first_level.executor
        return executor.waiting + executor.running

    def _export_metrics(self, name: str) -> None:
        def first_level() -> FirstLevel:
            return self._hot_swap.current.first_level

        exported: list[Metric] = [
            *self._request_metrics.exported,
            Gauge("requests_waiting", "Texts that wait for the first level", lambda: first_level().executor.waiting),
            Gauge("requests_running", "Texts that it computes", lambda: first_level().executor.running),
            *self._cascade_metrics.exported(),
            *self._client.metrics(),
            *self._entry.metrics,
            *self._follower.metrics,
            Liveness(self._steps, self._log).metric,
        ]
        self._metrics = MetricsFlusher(self._pb_utils, name, exported, self._log)


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
