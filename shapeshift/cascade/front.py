"""The front of a cascade: Triton requests in, labels out, by the candidate that the registry names.

The registry is looked at once a second; a new candidate serves as soon as all its later levels answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import ServingCandidate
from shapeshift.cascade.level_client import LevelClient, LevelGoneError
from shapeshift.cascade.service import CascadeService, ClassifyRequest, Row
from shapeshift.cascade.settings import CascadeSettings, GeneratedCascadeSettings
from shapeshift.errors import CancelledRequestError, InvalidInputError
from shapeshift.loops import Loop
from shapeshift.registry import FILE, FolderWatch
from shapeshift.serving import description, events
from shapeshift.serving.description import Description
from shapeshift.serving.front import Client, Front, RequestLine
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Counter, Gauge, Gauges, Histogram, Metric, RequestMetrics
from shapeshift.serving.model_args import Log, ModelArgs
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils
from shapeshift.serving.text_inputs import NUM_TOKENS, TEXT_PAIR, texts_of_request, wanted_outputs
from shapeshift.triton.async_client import AsyncClient
from shapeshift.triton.endpoint import own_endpoint

_PARAMETERS = settings.names(CascadeSettings, GeneratedCascadeSettings)
# The longest text that the length histogram tells apart.
_MAX_LENGTH = 512
_CHECK_S = 1.0
_PROBE_S = 0.2
_READY_TIMEOUT_S = 60.0
_CONTROL_MS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_MAX_LEVELS = 4
# The recent means cover about so many texts.
_WINDOW = 512


class CascadeFront(Front[ClassifyRequest]):
    """Has texts classified by a small model, and by larger ones where that is not sure."""

    takes = ("truncate", "level", "min_accuracy")

    def __init__(
        self, pb_utils: PbUtils, args: ModelArgs, levels: LevelClient | None = None, check_s: float = _CHECK_S
    ) -> None:
        super().__init__(pb_utils, args)
        settings.refuse_unknown(args.parameters, _PARAMETERS)
        self._settings = settings.read(CascadeSettings, args.parameters)
        generated = settings.read(GeneratedCascadeSettings, args.parameters)
        if not generated.engines_dir:
            raise InvalidInputError("engines_dir", "", "the folder of all models' engines; run `shapeshift engines`")
        for name in args.outputs:
            if name not in _OUTPUTS:
                raise InvalidInputError("output", name, f"one of {', '.join(_OUTPUTS)}")
        self._pairs = TEXT_PAIR in args.inputs
        self._engines = (args.folder / generated.engines_dir).resolve()
        self._candidates = (args.folder / self._settings.candidates_dir).resolve()
        self._levels = levels or _level_client(self.log.error, self._settings.queue_rows)
        self._check_s = check_s
        self._registry_file = FolderWatch(self._candidates / FILE)
        # The state that is read next is not a change.
        self._registry_file.has_changed()
        serving = candidates.serving(self._candidates, self._settings.task)
        # The first service does not wait for its later levels: the first level can answer without them.
        self._service = self._open(serving)
        self._cascade_metrics = CascadeMetrics(serving)
        self._lock = threading.Lock()
        self._changes = Loop("candidates", self._follow_registry, self.log.error)
        self._changes.start()
        self.begin(RequestMetrics("texts", _MAX_LENGTH, self._settings.slo_ms))
        self.log.info(f"ready: task {self._settings.task}, candidate {serving.candidate.name}")

    # The way of a request.

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> ClassifyRequest:
        texts = texts_of_request(self.pb_utils, request, self._pairs)
        return ClassifyRequest(client, texts, wanted_outputs(request, self.args.outputs), params, self.done)

    def start(self, job: ClassifyRequest) -> None:
        with self._lock:
            service = self._service
            service.acquire()
        service.submit(job)
        for row in job.rows:
            if row.num_tokens and job.params.check is None:
                self.request_metrics.lengths.observe(row.num_tokens)

    def cancel(self, job: ClassifyRequest) -> None:
        job.fail(CancelledRequestError("the caller cancelled the request"))

    def respond(self, job: ClassifyRequest) -> InferenceResponse:
        return self.response({name: _OUTPUTS[name](job) for name in job.outputs})

    def answered(self, job: ClassifyRequest) -> None:
        if job.error is not None or job.params.check is not None:
            return
        is_routed = job.params.level is None
        for row in job.rows:
            self._cascade_metrics.count_row(row, not is_routed)
        # Several texts end together, with the slowest.
        if is_routed and len(job.rows) == 1:
            (row,), took_ms = job.rows, (time.monotonic() - job.arrived) * 1e3
            confidence = None if row.confidence is None else round(float(row.confidence), 3)
            events.record("text", level=row.final.level, confidence=confidence, ms=round(took_ms, 1))

    def facts(self, job: ClassifyRequest) -> RequestLine:
        answers = [row.answer for row in job.rows if row.answer is not None]
        return {
            "tokens": sum(row.num_tokens for row in job.rows),
            "texts": len(job.rows),
            "levels": sorted({answer.level for answer in answers}),
            "words_pruned": sum(row.words_pruned for row in job.rows),
            "compute_ms": max(row.engine_ms for row in job.rows),
        }

    # What the front is.

    def describe(self) -> Description:
        service = self._service
        table, candidate = service.serving.table, service.serving.candidate
        return Description(
            description.TEXT_CLASSIFICATION,
            precision=service.engines.precision,
            max_tokens=service.engines.max_tokens,
            labels=table.labels,
            pairs=self._pairs,
            tasks=[table.task],
            levels=candidate.levels,
            engines=description.engines_version(service.manifest_sha256),
            registry=description.registry_version({candidate.name: table.as_json()}),
        )

    def load(self) -> float:
        executor = self._service.executor
        return executor.waiting + executor.running

    def metrics(self) -> Sequence[Metric]:
        return [
            Gauge("requests_waiting", "Texts that wait for the first level", lambda: self._service.executor.waiting),
            Gauge("requests_running", "Texts that it computes", lambda: self._service.executor.running),
            *self._cascade_metrics.exported(),
            *self._levels.metrics(),
        ]

    def steps(self) -> Sequence[StepCounter]:
        return self._service.executor.steps

    def stop(self) -> None:
        self._changes.stop(5.0)
        self._service.close()
        self._levels.close()

    # The candidate that serves.

    def _open(self, serving: ServingCandidate) -> CascadeService:
        if serving.table.pairs != self._pairs:
            inputs = "pairs" if serving.table.pairs else "single texts"
            listed = "listed" if serving.table.pairs else "not listed"
            allowed = f"{listed}: candidates of task {serving.table.task} classify {inputs}"
            raise InvalidInputError(f"input {TEXT_PAIR}", "listed" if self._pairs else "not listed", allowed)
        return CascadeService(serving, self._engines, self._settings, self._levels, self.log.warning, self.args.device)

    def _follow_registry(self) -> float:
        """One look at the registry. Returns the seconds until the next one."""
        if self._registry_file.has_changed():
            try:
                self._swap()
            except Exception as error:  # noqa: BLE001  the current candidate keeps serving
                self._cascade_metrics.failed_swaps.add()
                name = self._service.serving.candidate.name
                self.log.error(
                    f"{self._candidates}: the change is not applied, candidate {name} keeps serving: {error}"
                )
        return self._check_s

    def _swap(self) -> None:
        """Serve with the candidate that the registry names now, once its later levels answer."""
        serving, before = candidates.serving(self._candidates, self._settings.task), self._service
        if serving == before.serving:
            return
        for model in serving.candidate.levels[1:]:
            self._wait_ready(model)
        if self._changes.stopped.is_set():
            return
        service = self._open(serving)
        with self._lock:
            if not self._changes.stopped.is_set():
                self._service = service
        if self._service is not service:
            service.close()
            return
        self._cascade_metrics.profile(serving)
        self._cascade_metrics.swaps.add()
        self.log.info(f"candidate {serving.candidate.name} serves task {self._settings.task}")
        before.close()

    def _wait_ready(self, model: str) -> None:
        end = time.monotonic() + _READY_TIMEOUT_S
        while not self._changes.stopped.is_set() and not self._levels.is_ready(model):
            if time.monotonic() > end:
                raise LevelGoneError(f"model {model} was not ready within {_READY_TIMEOUT_S:g} s")
            self._changes.stopped.wait(min(_PROBE_S, self._check_s))


def _level_client(log: Log, most_calls: int) -> LevelClient:
    server = own_endpoint()
    return LevelClient(AsyncClient(server.address, server.tls), log, most_calls)


class RecentMean:
    """The mean of about the last `_WINDOW` values, of all while there are fewer; and what profiling measured."""

    def __init__(self, profiled: float) -> None:
        self.value = 0.0
        self._profiled = profiled
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) / min(self._count, _WINDOW)

    @property
    def drift(self) -> float:
        """The mean less what was profiled; 0 before the first value."""
        return self.value - self._profiled if self._count else 0.0


class CascadeMetrics:
    """What is counted of answers, and how far traffic has drifted from the candidate's profile.

    Rows are counted on one thread, swaps of the candidate on one.
    """

    def __init__(self, serving: ServingCandidate) -> None:
        self.profile(serving)
        self._levels = [
            Counter("level_texts_total", "Texts answered by each level", {"level": str(number)})
            for number in range(1, _MAX_LEVELS + 1)
        ]
        self._control_ms = Histogram("control_ms", "Control time of a text: dispatch, pruning, ensemble", _CONTROL_MS)
        self._words_pruned = Counter("words_pruned_total", "Words that later levels did not read")
        self._fallbacks = Counter("fallbacks_total", "Texts that kept an earlier level's answer")
        self.swaps = Counter("candidate_swaps_total", "Changes of the candidate")
        self.failed_swaps = Counter("candidate_errors_total", "Changes that could not be applied")

    def profile(self, serving: ServingCandidate) -> None:
        """Compare with this candidate's profile from now on."""
        candidate = self._candidate = serving.candidate
        last = [one for one in serving.table.candidates if one.levels == candidate.levels[-1:]]
        self._last_accuracy = max((one.accuracy for one in last), default=0.0)
        self._early, self._confidence = RecentMean(candidate.shares[0]), RecentMean(candidate.mean_confidence)

    def count_row(self, row: Row, level_requested: bool) -> None:
        """Count an answered row; level_requested: whether the client asked for this level."""
        self._levels[min(row.final.level, _MAX_LEVELS) - 1].add()
        self._words_pruned.add(row.words_pruned)
        self._fallbacks.add(row.fell_back)
        self._control_ms.observe(row.control_ms)
        if not level_requested and row.confidence is not None:
            self._early.add(row.final.level == 1)
            self._confidence.add(row.confidence)

    def exported(self) -> Sequence[Metric]:
        """All metrics, for the flusher."""
        return [
            *self._levels,
            *(self._control_ms, self._words_pruned, self._fallbacks, self.swaps, self.failed_swaps),
            Gauge("profiled_accuracy", "Accuracy in the profile", lambda: self._candidate.accuracy),
            Gauge(
                "profiled_last_level_accuracy",
                "The same of the last level alone; 0: not profiled",
                lambda: self._last_accuracy,
            ),
            Gauge(
                "first_level_threshold",
                "Texts of which level 1 is at most so sure go on; 0: none does",
                lambda: self._candidate.gaps[0].c if self._candidate.gaps else 0.0,
            ),
            Gauges(
                "profiled_level_ms",
                "Mean engine time of a text in each level in the profile",
                "level",
                lambda: {str(level): ms for level, ms in enumerate(self._candidate.model_latencies, 1)},
            ),
            Gauge("early_share_recent", "Recent share of texts answered by level 1", lambda: self._early.value),
            Gauge("early_share_drift", "The same minus the profile's", lambda: self._early.drift),
            Gauge("confidence_recent", "Recent mean confidence of level 1", lambda: self._confidence.value),
            Gauge("confidence_drift", "The same minus the profile's", lambda: self._confidence.drift),
        ]


def _label(request: ClassifyRequest) -> Any:
    table = request.serving.table
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
