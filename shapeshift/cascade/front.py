"""The front of a cascade: Triton requests in, labels out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from shapeshift import settings
from shapeshift.cascade.calls import CallPool
from shapeshift.cascade.cascade import Cascade
from shapeshift.cascade.exchange import Exchange
from shapeshift.cascade.levels import LevelClient
from shapeshift.cascade.meters import CascadeMeters
from shapeshift.cascade.query import Query
from shapeshift.cascade.registry import Chosen
from shapeshift.cascade.settings import CascadeSettings, GeneratedCascadeSettings
from shapeshift.cascade.table import Table
from shapeshift.errors import InvalidInputError
from shapeshift.serving import log, parameters
from shapeshift.serving.answers import Answers
from shapeshift.serving.metrics import Counter, Gauge, Histogram, MetricsFlusher, RequestMeters
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.sender import SenderThread
from shapeshift.serving.text_inputs import TEXT_PAIR, texts_of_request

_OWN_PARAMETERS = ("truncate", "level", "min_accuracy")
_LENGTHS = 512


class CascadeFront:
    """Owns the process' threads. `execute` never blocks and never raises; every request is answered once."""

    def __init__(self, pb_utils: Any, args: ModelArgs) -> None:
        self._pb_utils = pb_utils
        self._log = log.of_model(pb_utils, args.name)
        settings.refuse_unknown(args.parameters, settings.names(CascadeSettings, GeneratedCascadeSettings))
        own = settings.read(CascadeSettings, args.parameters)
        generated = settings.read(GeneratedCascadeSettings, args.parameters)
        if not generated.engines_dir:
            raise InvalidInputError("engines_dir", "", "the folder of all models' engines; run `make engines`")
        for name in args.outputs:
            if name not in _OUTPUTS:
                raise InvalidInputError("output", name, f"one of {', '.join(_OUTPUTS)}")
        self._outputs = args.outputs
        self._pairs = TEXT_PAIR in args.inputs
        self._sender = SenderThread(pb_utils, self._log)
        self._counted = CascadeMeters()
        self._calls = CallPool(own.call_threads, own.queue_calls, own.call_timeout_ms / 1e3, own.retry_ms / 1e3)
        client = LevelClient(pb_utils)
        engines = (args.folder / generated.engines_dir).resolve()

        def open_cascade(chosen: Chosen) -> Cascade:
            self._check(chosen.table)
            return Cascade(chosen, engines, own, client, self._calls, self._counted, self._log)

        folder = (args.folder / own.candidates_dir).resolve()
        self._exchange = Exchange(folder, own, open_cascade, client, self._counted, self._log)
        self._count_and_export(args.name, own.slo_ms)
        self._log(f"ready: task {own.task}, candidate {self._exchange.current.candidate.name}")

    def execute(self, requests: Sequence[Any]) -> None:
        """Start every request; those that cannot be served are answered with an error at once."""
        self._answers.start(requests, self._submit)

    def close(self) -> None:
        """Stop producers before consumers: levels, then the sender, then metrics."""
        self._exchange.close()
        self._calls.close()
        self._sender.close()
        self._metrics.close()

    def _check(self, table: Table) -> None:
        if table.pairs != self._pairs:
            wanted = (
                f"{'listed' if table.pairs else 'not listed'}, as the candidates of task {table.task} were profiled"
            )
            raise InvalidInputError(f"input {TEXT_PAIR}", self._pairs, wanted)

    def _submit(self, request: Any, sender: Any) -> None:
        given = parameters.parse(request.parameters(), _OWN_PARAMETERS)
        rows = texts_of_request(self._pb_utils, request, self._pairs)
        wanted = [name for name in self._outputs if name in request.requested_output_names()]
        cascade = self._exchange.take()
        try:
            cascade.check_level(given.level)
            control = cascade.control_for(given.min_accuracy)
            finished = partial(self._reply, sender, wanted, cascade)
            query = Query(rows, control, finished, given.level, given.latency_ms, given.truncate)
            lengths = cascade.submit(query)
        except Exception:
            cascade.leave()
            raise
        for tokens in lengths:
            self._meters.lengths.observe(tokens)

    def _reply(self, sender: Any, wanted: list[str], cascade: Cascade, query: Query) -> None:
        cascade.leave()
        if query.error is not None:
            self._answers.fail(sender, query.error)
            return
        make = partial(self._response, query, wanted, cascade.table)
        self._answers.send(sender, make, query.arrived, partial(self._count_rows, query))

    def _response(self, query: Query, wanted: list[str], table: Table) -> Any:
        tensors = [self._pb_utils.Tensor(name, _OUTPUTS[name](query, table)) for name in wanted]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _count_rows(self, query: Query) -> None:
        for row in query.rows:
            self._counted.answered(row, query.level is not None)

    def _count_and_export(self, name: str, slo_ms: float) -> None:
        self._meters = RequestMeters("texts", _LENGTHS, slo_ms)
        self._answers = Answers(self._pb_utils, self._sender, self._meters)
        exchange = self._exchange
        exported: list[Counter | Gauge | Histogram] = [
            *self._meters.exported,
            Gauge(
                "requests_waiting", "Texts that wait for the first level", lambda: exchange.current.first.pool.waiting
            ),
            Gauge("requests_running", "Texts that it computes", lambda: exchange.current.first.pool.running),
            *self._counted.exported(),
            *self._calls.metrics(),
        ]
        self._metrics = MetricsFlusher(self._pb_utils, name, exported, self._log)


def _label(query: Query, table: Table) -> Any:
    if table.is_regression:
        names = [f"{float(row.final.probabilities[0]):.6g}" for row in query.rows]
    else:
        names = [table.labels[int(row.final.probabilities.argmax())] for row in query.rows]
    return np.array([[name.encode()] for name in names], dtype=object)


def _column(values: list[float], kind: type) -> Any:
    return np.array(values, dtype=kind)[:, None]


_OUTPUTS: dict[str, Callable[[Query, Table], Any]] = {
    "LABEL": _label,
    "PROBABILITIES": lambda query, table: np.stack([row.final.probabilities for row in query.rows]).astype(np.float32),
    "CONFIDENCE": lambda query, table: _column([row.final.confidence for row in query.rows], np.float32),
    "LEVEL": lambda query, table: _column([row.final.level for row in query.rows], np.int32),
    "WORDS_PRUNED": lambda query, table: _column([row.pruned for row in query.rows], np.int32),
    "ENGINE_MS": lambda query, table: _column([row.engine_ms for row in query.rows], np.float32),
    "CONTROL_MS": lambda query, table: _column([row.control_ms for row in query.rows], np.float32),
}
