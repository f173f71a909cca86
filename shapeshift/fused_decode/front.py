"""The front of a model that generates: Triton requests in, text out as it is generated."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import CancelledRequestError, InvalidInputError, NotFoundError
from shapeshift.fused_decode import loading
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.engine.sampling.logit_edits import GRAMMARS, token_rules
from shapeshift.fused_decode.job import AnswerOutputs, BeamsJob, ChoicesJob, GenerateJob, Prompt, sample_params
from shapeshift.fused_decode.loading import Loaded
from shapeshift.fused_decode.policy.admission import Admission, FirstComeFirstServed
from shapeshift.fused_decode.request import ABORT, Reason, Request
from shapeshift.fused_decode.request_parser import TEXT, ParsedRequest, RequestParser
from shapeshift.serving import parameters
from shapeshift.serving.description import GENERATION, Description, checkpoint_name, checkpoint_version
from shapeshift.serving.front import Affinity, Client, Front, RequestLine
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.metrics import Gauge, Metric, RequestMetrics
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender
from shapeshift.serving.responses import SingleResponse
from shapeshift.settings import Choices

# Imported where the setting asks for it.
SPECULATORS: Choices[Any] = Choices(
    "num_speculative_tokens", {"prompt_lookup": "shapeshift.fused_decode.engine.speculation:Speculator"}
)


class GenerateFront(Front[GenerateJob]):
    """Generates text by one decode loop, which all running requests share. Requests are answered piece by piece."""

    # HTTP clients name a request with `id`, which Triton's generate endpoints pass on as a parameter.
    takes: ClassVar[Sequence[str]] = ("id",)
    sampling_takes: ClassVar[Sequence[str]] = ()
    """The names of `takes` that the input `sampling_parameters` may hold too."""
    request_type: ClassVar[type[Request]] = Request
    stream, stop_id, id_output = True, "stop_id", "request_id"

    def __init__(
        self,
        pb_utils: PbUtils,
        args: ModelArgs,
        loaded: Loaded | None = None,
        admission: Admission[Request] | None = None,
    ) -> None:
        """loaded: by default what `args` names; admission: by default in order of arrival."""
        super().__init__(pb_utils, args)
        self.loaded = loaded or loading.load(args, self.log)
        settings, runtime = self.loaded.settings, self.loaded.runtime
        self._parser = RequestParser(pb_utils, runtime.vocab_size, self.sampling_takes)
        self.grammars: Any = None
        self._live: dict[str, list[Request]] = {}
        self._lock = threading.Lock()
        self.loop = DecodeLoop(
            runtime,
            FirstComeFirstServed(settings.queue_requests, settings.classes) if admission is None else admission,
            self._deliver,
            self.log.error,
            pool=self.loaded.pool,
            prefill_tokens=settings.prefill_tokens,
            speculator=_speculator(settings.num_speculative_tokens),
        )
        self.affinity = Affinity(self.named_adapter, self._parser.prompt_tokens, self._unread_tokens)
        self.begin(RequestMetrics("prompts", settings.max_length, settings.slo_ms))
        self.loop.start()

    def serve(self, request: InferenceRequest, sender: ResponseSender) -> None:
        """Generate, or end the request whose id is named."""
        stop_id = self._parser.stop_id(request)
        if stop_id is None:
            super().serve(request, sender)
        else:
            self._stop(stop_id, request, sender)

    def admit(self, params: RequestParameters) -> None:
        self.loop.admission.refuse_when_full(params.slo_class)

    def parse(self, request: InferenceRequest, params: RequestParameters, client: Client) -> GenerateJob:
        parsed = self._parser.parse(request)
        params = parameters.joined(params, parsed.request_parameters)
        prompts = self._prompts(parsed)
        for prompt in prompts if params.check is None else ():
            self.request_metrics.lengths.observe(len(prompt.ids))
        sampling = parsed.sampling_params
        names = parsed.outputs.intersection(request.requested_output_names())
        table = self.loaded.token_bytes if parsed.skip_special_tokens else self.loaded.all_bytes
        outputs = AnswerOutputs(names, table)
        several = BeamsJob if sampling.num_beams > 1 else ChoicesJob
        kind = GenerateJob if len(prompts) * sampling.samples == sampling.num_beams == 1 else several
        job = kind(self, client, parsed, params, prompts, outputs)
        job.requests = self._requests(request.request_id() or params.id or uuid.uuid4().hex, parsed, job, table)
        return job

    def tokens(self, request: InferenceRequest) -> NDArray[np.object_]:
        tokenizer = self.loaded.tokenizer
        listed = [
            tokenizer.listed(prompt, row) if isinstance(prompt, bytes) else tokenizer.listed_ids(prompt.tolist())
            for row, prompt in enumerate(self._parser.prompts(request))
        ]
        return np.array(listed, dtype=object)

    def start(self, job: GenerateJob) -> None:
        with self._lock:
            self._live.setdefault(job.requests[0].id, []).extend(job.requests)
        structured = job.params.structured_outputs
        try:
            if structured is None:
                self.queue(job)
                return
            if self.grammars is None:
                runtime = self.loaded.runtime
                self.grammars = GRAMMARS["llguidance"](self.loaded.tokenizer_file, runtime.vocab_size, runtime.eos_ids)
            self.grammars.compile(structured, partial(self._compiled, job))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the answer, with which the job is forgotten
            self.end_unqueued(job, error)

    def queue(self, job: GenerateJob) -> None:
        """Have the loop serve a job that nothing else is needed for. Any thread; never blocks."""
        for request in job.requests:
            self.submit(request)

    def submit(self, request: Request) -> None:
        """Have the loop serve one of a job's requests. A refusal is its last response."""
        try:
            self.loop.submit(request)
        except Exception:  # noqa: BLE001  whatever it is, the loop has finished the request with it
            self._deliver([request])

    def cancel(self, job: GenerateJob) -> None:
        self.end(job, job.error or CancelledRequestError("the caller cancelled the request"))

    def end(self, job: GenerateJob, reason: Reason) -> None:
        """End a job early. Any thread."""
        for request in job.requests:
            self.loop.end(request, reason)

    def end_unqueued(self, job: GenerateJob, reason: Reason) -> None:
        """End a job that the loop does not have. Any thread."""
        for request in job.requests:
            request.finish(reason)
        self.done(job)

    def done(self, job: GenerateJob) -> None:
        """Send what is new of a job: called whenever there is something."""
        self.responder.post([job])

    def respond(self, job: GenerateJob) -> InferenceResponse:
        return self.response(job.values)

    def answered(self, job: GenerateJob) -> None:
        """Forget a job."""
        name = job.requests[0].id
        with self._lock:
            others = [other for other in self._live.pop(name, ()) if other.job is not job]
            if others:
                self._live[name] = others

    def facts(self, job: GenerateJob) -> RequestLine:
        times = job.requests[0].timings_ms()
        return {
            "id": job.requests[0].id,
            "slo_class": job.parameters.slo_class,
            "tokens": sum(len(prompt.ids) for prompt in job.prompts),
            "generated": sum(request.generated for request in job.requests),
            "finish_reason": job.requests[0].finish_reason,
            "queue_ms": times["queue_ms"],
            "prefill_ms": times["prefill_ms"],
            "decode_ms": times["decode_ms"],
            "compute_ms": times["prefill_ms"] + times["decode_ms"],
        }

    def recorded(self, job: GenerateJob) -> Sequence[RequestLine]:
        slo_class = job.parameters.slo_class or ""
        return [
            {"length": len(request.prompt), "output_length": request.generated, "slo_class": slo_class}
            for request in job.requests
        ]

    def describe(self) -> Description:
        return Description(
            GENERATION,
            checkpoint=checkpoint_name(self.args.parameters),
            precision=self.args.parameters.get("precision"),
            max_tokens=self.loaded.runtime.max_length,
            chat_template=self.loaded.chat.text,
            tool_use_template=self.loaded.chat.tool_use,
            special_tokens=self.loaded.chat.special_tokens,
            tool_parser=self.loaded.settings.tool_parser or None,
            stream=self.args.name,
            checkpoint_version=checkpoint_version(self.args.parameters),
        )

    def load(self) -> float:
        return len(self.loop.admission) + self.loop.slots.requests

    def metrics(self) -> Sequence[Metric]:
        loop = self.loop
        return [
            *loop.metrics.exported,
            *loop.admission.metrics(),
            Gauge("requests_waiting", "Requests that wait for a slot", lambda: len(loop.admission)),
            Gauge("requests_running", "Requests that hold a slot", lambda: loop.slots.requests),
            Gauge("slots", "Number of slots", lambda: len(loop.slots)),
            Gauge("kv_cache_usage", "Share of the cache that requests hold", lambda: loop.slots.pool.usage),
            Gauge("slot_tokens", "Tokens that the slots hold", lambda: int(loop.slots.cached.sum())),
        ]

    def steps(self) -> Sequence[StepCounter]:
        return [self.loop.steps]

    def stop(self) -> None:
        if self.grammars is not None:
            self.grammars.close()
        self.loop.close()
        self.loaded.runtime.close()

    def named_adapter(self, request: InferenceRequest) -> str:
        """What the node of a fleet that serves `request` should have in memory; empty: nothing that differs."""
        return ""

    @property
    def live(self) -> list[Request]:
        """What has not been answered."""
        with self._lock:
            return [request for requests in self._live.values() for request in requests]

    def _prompts(self, parsed: ParsedRequest) -> list[Prompt]:
        """The prompts as text and tokens. Raises InvalidInputError for one that is too long."""
        prompts, table, longest = [], self.loaded.token_bytes, self.loaded.runtime.max_length
        for row, prompt in enumerate(parsed.prompts):
            number = row if len(parsed.prompts) > 1 else None
            if isinstance(prompt, bytes):
                ids = self.loaded.tokenizer.encode(prompt, number, add_special_tokens=parsed.add_special_tokens)
                prompts.append(Prompt(prompt, ids))
                continue
            if len(prompt) >= longest:
                limit = f"at most {longest - 1}, one less than max_length ({longest})"
                raise InvalidInputError("input_ids", f"{len(prompt)} tokens", limit, number)
            texts = (table[token] for token in prompt.tolist() if token < len(table))
            prompts.append(Prompt(b"".join(texts), prompt))
        return prompts

    def _requests(self, name: str, parsed: ParsedRequest, job: GenerateJob, table: Sequence[bytes]) -> list[Request]:
        """The samples of each prompt, prompt after prompt. table: the bytes of each token.

        Raises InvalidInputError for those that no slots hold.
        """
        runtime = self.loaded.runtime
        rules = token_rules(job.params, self.loaded.tokenizer.encode_piece, runtime.vocab_size, runtime.eos_ids)
        requests = [
            self.request_type(
                name,
                prompt.ids,
                params,
                TextStream(table, params.stop),
                max_length=runtime.max_length,
                stream=parsed.stream,
                latency_ms=job.parameters.latency_ms,
                job=job,
                rules=rules,
                slo_class=job.parameters.slo_class,
            )
            for prompt in job.prompts
            for params in sample_params(job.params)
        ]
        for request in requests:
            self.loop.slots.require_room(request)
        return requests

    def _compiled(self, job: GenerateJob, outcome: Any) -> None:
        """Any thread calls this, with the grammar that the job waits for."""
        if isinstance(outcome, Exception):
            self.end_unqueued(job, outcome)
            return
        for request in job.requests:
            request.grammar = self.grammars.new(outcome, self.loop.wake)
        self.queue(job)

    def _deliver(self, requests: Sequence[Request]) -> None:
        self.responder.post(list(dict.fromkeys(request.job for request in requests)))

    def _stop(self, stop_id: str, triton_request: InferenceRequest, sender: ResponseSender) -> None:
        """End the requests of that id; the stop request itself gets an empty text."""
        with self._lock:
            stopped = list(self._live.get(stop_id, ()))
        if not stopped:
            raise NotFoundError(f"stop_id: no request {stop_id!r} waits or runs")
        for job in dict.fromkeys(request.job for request in stopped):
            self.end(job, ABORT)
        takes_text = TEXT in triton_request.requested_output_names()
        nothing = partial(self.response, {TEXT: np.array([b""], dtype=object)} if takes_text else {})
        self.responder.post([SingleResponse(sender, nothing, partial(self.responder.count, "OK"))])

    def _unread_tokens(self) -> float:
        """Prompt tokens to be computed before every request here has its first token. Any thread."""
        cached = self.loop.slots.cached
        unread = 0
        for request in self.live:
            if not request.generated and not request.is_finished:
                slot = request.slot
                unread += max(0, len(request.prompt) - (0 if slot is None else int(cached[slot])))
        return float(unread)


def _speculator(most: int) -> Any:
    """What proposes at most so many tokens a text, where any are."""
    return SPECULATORS["prompt_lookup"](most) if most else None
