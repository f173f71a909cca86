"""The front of a technique: one model of Triton, and the way of every request through it."""

from __future__ import annotations

import importlib
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from shapeshift import settings
from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.serving import description, error_codes, events, model_args, parameters
from shapeshift.serving.description import Description
from shapeshift.serving.liveness import Liveness, StepCounter
from shapeshift.serving.metrics import CHECKS, Metric, MetricsFlusher, RequestMetrics
from shapeshift.serving.model_args import (
    DESCRIPTION,
    TOKENS,
    FrontSettings,
    ModelArgs,
    Signature,
    fleet_file,
    model_log,
)
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import (
    InferenceRequest,
    InferenceResponse,
    ModelConfig,
    PbUtils,
    ResponseSender,
    Returned,
    require_numpy,
)
from shapeshift.serving.responses import CancellationWatch, Responder, SingleResponse


class Affinity(NamedTuple):
    """What a node of a fleet should have in memory for a request, and how long it takes to its first token.

    key            what a request should find in memory, such as its adapter; empty: nothing
    prompt_tokens  of a request, before it is parsed: about how many
    unread_tokens  prompt tokens of the requests here that have no first token yet. Any thread
    """

    key: Callable[[InferenceRequest], str]
    prompt_tokens: Callable[[InferenceRequest], float]
    unread_tokens: Callable[[], float]


RequestLine = dict[str, Any]
"""What the log says of a request in JSON, once it has ended."""


class Trace(Protocol):
    """The span of a request that Triton traces. header: what makes a call to another model part of the trace."""

    @property
    def header(self) -> str: ...

    def span(self, name: str, began: float, ended: float, facts: RequestLine) -> None:
        """A part of the request. began, ended: monotonic, in seconds."""

    def end(self, facts: RequestLine, outcome: str) -> None:
        """The request has ended. facts: as the log has them; the times among them become parts of the span."""


class Client(NamedTuple):
    """Who gets the answer to a request.

    wants_code: see `error_codes.with_code`; line: None: the log gets none; trace: None: the request is not traced.
    code: with which a good answer is counted.
    """

    sender: ResponseSender
    wants_code: bool
    line: RequestLine | None = None
    trace: Trace | None = None
    code: str = "OK"


class Job(Protocol):
    """A request that a technique serves. arrived: monotonic, in seconds; error: why it failed, None if it has not."""

    @property
    def client(self) -> Client: ...

    @property
    def arrived(self) -> float: ...

    @property
    def error(self) -> Exception | None: ...

    def __hash__(self) -> int: ...


J = TypeVar("J", bound=Job)


class Tracer(Protocol):
    """Where the spans of this process go."""

    def begin(self, request: InferenceRequest) -> Trace | None:
        """The span of a request that has arrived just now; None where Triton does not trace it."""

    def join(self, header: str) -> Trace | None:
        """The span of what begins now, in the trace of `header`; a new trace, for a share of them, where it is empty.

        None where it is not traced.
        """

    def close(self) -> None:
        """Send what is left."""


class Peers(Protocol):
    """The other nodes of a fleet, where the server is one of its nodes. metrics, steps: as those of `Front`."""

    metrics: Sequence[Metric]
    steps: Sequence[StepCounter]

    def submit(self, request: InferenceRequest, sender: ResponseSender) -> None:
        """Have a request served on the node that is best for it: here, by `Front.serve`, or there. Raises as that."""

    def describe(self) -> Description:
        """What the front is, and its load."""

    def close(self) -> None:
        """Fail what other nodes serve for this front, and stop."""


class Front(ABC, Generic[J]):
    """Owns the threads of a process. `execute` never blocks and never raises; every request is answered once.

    `serve` is the way of a request. A technique says what it takes (`admit`, `parse`), begins the work (`start`), calls
    `done` when it has ended, and makes the answer (`respond`). Its `__init__` ends with `begin`.
    """

    takes: ClassVar[Sequence[str]] = ()
    """The request parameters that a technique takes beyond `parameters.COMMON`."""
    any_node: ClassVar[bool] = True
    """Whether the same front on another node of a fleet may serve a request."""
    stream: ClassVar[bool] = False
    """Whether Triton takes several responses to a request; `done` is called for each then, see `GenerateFront`."""
    # What the forwarding between nodes has to know of a front that generates: names of an input and of an output.
    stop_id, id_output = "", ""
    affinity: Affinity | None = None

    def __init__(self, pb_utils: PbUtils, args: ModelArgs) -> None:
        self.pb_utils = pb_utils
        self.args = args
        self.log = model_log(pb_utils, args.name)
        self._log_share = settings.read(FrontSettings, args.parameters).log_requests

    def begin(self, request_metrics: RequestMetrics) -> None:
        """Take requests from now on, and export the metrics. Raises ShapeshiftError where a fleet cannot be joined.

        Raises UnsupportedError where requests are to be traced and the packages for it are missing.
        """
        self._tracer = tracer_of(self.args.name)
        events.open_ring(self.args.name, self.log.warning)
        self.request_metrics = request_metrics
        self.responder = Responder(self.pb_utils, request_metrics, self.log.error, self.stream)
        self.watch = CancellationWatch(self.log.error)
        self.peers = _peers(self) if self.any_node and fleet_file() else None
        metrics = [*request_metrics.exported, *self.metrics(), *([] if self.peers is None else self.peers.metrics)]
        self.liveness = Liveness(self._all_steps, self.log.error)
        metrics.append(self.liveness.metric)
        self._flusher = MetricsFlusher(self.pb_utils, self.args.name, metrics, self.log.warning)

    # The way of a request.

    def execute(self, requests: Sequence[InferenceRequest]) -> Returned:
        """Start every request. One that cannot be served is answered with its error at once."""
        return self.responder.start(requests, self.handle)

    def handle(self, request: InferenceRequest, sender: ResponseSender) -> None:
        """Serve a request, here or on another node. What this raises is its answer."""
        if description.is_wanted(request):
            self.responder.post([SingleResponse(sender, self._described)])
        elif [*request.requested_output_names()] == [TOKENS.name]:
            self.responder.post([SingleResponse(sender, partial(self.response, {TOKENS.name: self.tokens(request)}))])
        elif self.peers is not None:
            self.peers.submit(request, sender)
        else:
            self.serve(request, sender)

    def serve(self, request: InferenceRequest, sender: ResponseSender) -> None:
        """Serve a request here. What this raises is its answer."""
        line: RequestLine | None = {} if self._log_share and random.random() < self._log_share else None
        trace = self.trace(request)
        try:
            params = self.read(request)
            if line is not None:
                line |= {"id": request.request_id() or params.id, "slo_class": params.slo_class}
            self.admit(params)
            code = CHECKS.get(params.check or "", "OK")
            job = self.parse(request, params, Client(sender, params.forwarded, line, trace, code))
            self.watch.add(job, sender.is_cancelled, partial(self.cancel, job))
            try:
                self.start(job)
            except BaseException:
                self.watch.remove(job)
                raise
        except Exception as error:
            self._record(line, trace, {}, error_codes.code_name(error))
            raise

    def trace(self, request: InferenceRequest) -> Trace | None:
        """Begin the span of a request; None where it is not traced."""
        return None if self._tracer is None else self._tracer.begin(request)

    def done(self, job: J) -> None:
        """Answer a job whose work has ended: called once for each that was started, on any thread."""
        # On the sending thread: it waits for a check of Triton that runs, and no check may follow the response.
        before = partial(self.watch.remove, job)
        sender, wants_code, line, trace, code = job.client
        ended = partial(self.ended, job, line, trace)
        if job.error is not None:
            self.responder.fail(sender, job.error, before, wants_code, ended)
        else:
            self.responder.send(sender, partial(self.respond, job), job.arrived, ended, before, code)

    def ended(self, job: J, line: RequestLine | None, trace: Trace | None, code: str) -> None:
        """Record, log and trace a job that has its last answer, as it was counted. On the thread that sent it."""
        self.answered(job)
        if events.wants_requests() and code not in CHECKS.values():
            events.record_rows("requests", ({"at": job.arrived, **row} for row in self.recorded(job)))
        if line is None and trace is None:
            return
        ms = (time.monotonic() - job.arrived) * 1e3
        facts = self.facts(job)
        facts = {"queue_ms": ms - facts.get("compute_ms", 0.0), **facts, "ms": ms}
        self._record(line, trace, facts, code)

    # What a technique says and does.

    def read(self, request: InferenceRequest) -> RequestParameters:
        """The parameters of a request. Raises InvalidInputError."""
        return parameters.parse(request.parameters(), self.takes, self.args.inputs)

    def admit(self, params: RequestParameters) -> None:
        """Raise OverloadedError where any request with these parameters is refused: before work is done for it."""

    @abstractmethod
    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> J:
        """The job of a request. Raises the error that its client gets, InvalidInputError as a rule."""

    @abstractmethod
    def start(self, job: J) -> None:
        """Begin the work; never blocks. Raises OverloadedError where there is no room for it."""

    @abstractmethod
    def cancel(self, job: J) -> None:
        """End the work of a job whose client has left."""

    @abstractmethod
    def respond(self, job: J) -> InferenceResponse:
        """The answer. Called on the sending thread."""

    def answered(self, job: J) -> None:
        """Count what has been answered, be it with `job.error`. Called on the thread that sent it."""

    def facts(self, job: J) -> RequestLine:
        """What the log says of a job that has ended. queue_ms: all but compute_ms, where it is left out."""
        return {}

    def recorded(self, job: J) -> Sequence[RequestLine]:
        """What a job that has ended asked for: of each text or image the columns of a trace (`workloads.trace`)."""
        return ()

    def describe(self) -> Description:
        """What the front is. Called on any thread, unless the front overrides `handle`."""
        raise NotImplementedError

    def tokens(self, request: InferenceRequest) -> NDArray[np.object_]:
        """TOKENS of the texts of a request, of a front that has this output. Raises InvalidInputError."""
        raise NotImplementedError

    @abstractmethod
    def load(self) -> float:
        """Requests, or rows of them, that wait or run here."""

    def metrics(self) -> Sequence[Metric]:
        """What is exported beside the metrics of requests."""
        return ()

    def steps(self) -> Sequence[StepCounter]:
        """The steps of the technique's threads, whose stalls are to be noticed."""
        return ()

    @abstractmethod
    def stop(self) -> None:
        """Answer what waits, and end the technique's threads."""

    def close(self) -> None:
        """Stop producers before consumers: what other nodes serve, the work, then the responses, then the metrics."""
        if self.peers is not None:
            self.peers.close()
        self.watch.close()
        self.stop()
        self.responder.close()
        self._flusher.close()
        events.close_ring()
        if self._tracer is not None:
            self._tracer.close()

    def export(self) -> None:
        """Export the metrics at once, which happens once a second."""
        self._flusher.flush()

    def response(self, values: Mapping[str, NDArray[Any]]) -> InferenceResponse:
        """A response with these outputs."""
        return self.pb_utils.InferenceResponse([self.pb_utils.Tensor(name, value) for name, value in values.items()])

    def _record(self, line: RequestLine | None, trace: Trace | None, facts: RequestLine, code: str) -> None:
        if line is not None:
            values = {name: value for name, value in (line | facts).items() if value not in (None, "")}
            rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}
            self.log.info("request " + events.encode({**rounded, "outcome": code}))
        if trace is not None:
            trace.end(facts, code)

    def _described(self) -> InferenceResponse:
        described = self.describe() if self.peers is None else self.peers.describe()
        text = np.array([described.as_json(self.args).encode()], dtype=object)
        return self.response({DESCRIPTION.name: text[:, None] if self.args.max_batch_size else text})

    def _all_steps(self) -> Sequence[StepCounter]:
        peers = [] if self.peers is None else self.peers.steps
        return [*self.responder.steps, *self.steps(), *peers]


class EntryPoint:
    """What Triton calls, in backends/*/model.py: a model's process has one.

    pb_utils: Triton's module, which only a model's process can import. front: the class of the technique's front.
    """

    pb_utils: ClassVar[PbUtils]
    front: ClassVar[type[Front[Any]]]

    @staticmethod
    def signature(parameters: Mapping[str, str]) -> Signature | None:
        """The inputs and outputs of a model with these parameters; None where config.pbtxt has them all."""
        return None

    @classmethod
    def auto_complete_config(cls, config: ModelConfig) -> ModelConfig:
        return model_args.auto_complete(cls.pb_utils, config, cls.signature)

    def open(self, args: ModelArgs) -> Any:
        """The front of a model. Raises ShapeshiftError."""
        return self.front(self.pb_utils, args)

    def initialize(self, args: Mapping[str, str]) -> None:
        try:
            require_numpy(self.pb_utils)
            self._front = self.open(model_args.read(args))
        except ShapeshiftError as error:
            raise self.pb_utils.TritonModelException(str(error)) from error
        model_args.freeze_objects()

    def execute(self, requests: Sequence[InferenceRequest]) -> Returned:
        return cast(Returned, self._front.execute(requests))

    def is_ready(self) -> bool:
        """Whether the model's threads go on. Triton asks from 26.03 on, when a client asks for `ready`."""
        return not self._front.liveness.is_stalled

    def finalize(self) -> None:
        self._front.close()
        model_args.freeze_objects()


def tracer_of(name: str) -> Tracer | None:
    """The tracer of this process, a model's or a program's; None where the environment names no receiver.

    Raises UnsupportedError where its packages are missing.
    """
    if not os.environ.get(events.TRACES_VARIABLE):
        return None
    # By name: without a receiver nothing of it is imported.
    try:
        return cast(Tracer, importlib.import_module("shapeshift.serving.traces").Tracer(name))
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"traces need {error.name}: pip install 'shapeshift[trace]'") from None


def _peers(front: Front[Any]) -> Peers:
    # By name: outside a fleet nothing of it is imported.
    entry = importlib.import_module("shapeshift.fleet.forwarding.entry")
    return cast(Peers, entry.FleetEntry(front))
