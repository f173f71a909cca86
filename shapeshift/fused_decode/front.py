"""The front of a model that generates: Triton requests in, text out as it is generated."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shapeshift.errors import CancelledRequestError, InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.fleet.forwarding.front import Affinity, Front, open_entry
from shapeshift.fused_decode.answers import TEXT, AnswerOutputs
from shapeshift.fused_decode.choices import BeamsResponse, ChoicesResponse, sample_params
from shapeshift.fused_decode.engine.beams import require_room
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.loop import DecodeLoop
from shapeshift.fused_decode.engine.sampling.grammar import GrammarCompiler, Template
from shapeshift.fused_decode.engine.sampling.logit_edits import token_rules
from shapeshift.fused_decode.request import ABORT, GenerationResponse, Ids, Request
from shapeshift.fused_decode.request_parser import ParsedRequest, RequestParser
from shapeshift.fused_decode.service import DecodeService
from shapeshift.serving import error_codes, parameters
from shapeshift.serving.cancellations import CancellationWatch
from shapeshift.serving.description import describing
from shapeshift.serving.liveness import Liveness
from shapeshift.serving.metrics import Gauge, MetricsFlusher, RequestMetrics
from shapeshift.serving.model_args import Log, ModelArgs, model_log
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceRequest, InferenceResponse, PbUtils, ResponseSender
from shapeshift.serving.responses import Responder, SingleResponse


class Prompt(NamedTuple):
    """A prompt: UTF-8, and INT64 [tokens]."""

    text: bytes
    ids: Ids


MakeService = Callable[[ModelArgs, Log], DecodeService]


class GenerateFront:
    """Owns the process' threads. `execute` never blocks and never raises; every request gets one last response."""

    def __init__(self, pb_utils: PbUtils, args: ModelArgs, make_service: MakeService = DecodeService) -> None:
        self._pb_utils = pb_utils
        self._log = model_log(pb_utils, args.name)
        self._service = make_service(args, self._log)
        self._inputs = args.inputs
        loaded = self._service.loaded
        settings, runtime = loaded.settings, loaded.runtime
        self._tokenizer = loaded.tokenizer
        self._token_bytes = loaded.token_bytes
        self._max_length = runtime.max_length
        self._parser = RequestParser(pb_utils, runtime.vocab_size, self._service.sampling_parameters)
        self._grammars = GrammarCompiler(loaded.tokenizer_file, runtime.vocab_size, runtime.eos_ids)
        self._live: dict[str, list[Request]] = {}
        self._lock = threading.Lock()
        self._request_metrics = RequestMetrics("prompts", settings.max_length, settings.slo_ms)
        self._responder = Responder(pb_utils, self._request_metrics, self._log, decoupled=True)
        self._watch = CancellationWatch(self._log)
        self.loop = DecodeLoop(
            runtime,
            self._service.admission(),
            self._deliver,
            self._log,
            prefill_tokens=settings.prefill_tokens,
            pool=self._service.pool,
            longest_step_s=runtime.longest_step_s,
            stream_responses=settings.stream_responses,
            speculator=self._service.speculator(),
        )
        self._entry = open_entry(
            Front(
                pb_utils,
                args,
                self._responder,
                self._log,
                self._submit,
                self._service.describe,
                load=lambda: len(self.loop.admission) + self.loop.slots.requests,
                affinity=Affinity(self._service.affinity, self._parser.prompt_tokens, self._unread_tokens),
                stream=True,
                stop_id="stop_id",
                id_output="request_id",
            )
        )
        self._enter = describing(pb_utils, self._responder, args, self._entry.describe, self._entry.submit)
        self._flusher = MetricsFlusher(pb_utils, args.name, self._exported(), self._log)
        self._service.open(self.loop)
        self.loop.start()

    def execute(self, triton_requests: Sequence[InferenceRequest]) -> None:
        """Queue every request for a slot; an invalid request, or one too many, gets an error at once."""
        self._responder.start(triton_requests, self._enter)

    def close(self) -> None:
        """Stop producers before consumers: what other nodes serve, the loop, then the responses, then the metrics."""
        self._entry.close()
        self._watch.close()
        self._grammars.close()
        self.loop.close()
        self._service.close()
        self._responder.close()
        self._flusher.close()

    def _submit(self, triton_request: InferenceRequest, sender: ResponseSender) -> None:
        stop_id = self._parser.stop_id(triton_request)
        if stop_id is not None:
            self._stop(stop_id, triton_request, sender)
            return
        # Before any work, so that a refused request costs nothing.
        self.loop.admission.refuse_when_full()
        given = parameters.parse(triton_request.parameters(), self._service.own_parameters, self._inputs)
        parsed = self._parser.parse(triton_request)
        given = parameters.joined(given, parsed.request_parameters)
        prompts = self._prompts(parsed)
        for prompt in prompts:
            self._request_metrics.lengths.observe(len(prompt.ids))
        outputs = AnswerOutputs(parsed.outputs.intersection(triton_request.requested_output_names()), self._token_bytes)
        response = self._response(sender, parsed, given, outputs, prompts)
        name = triton_request.request_id() or given.id or uuid.uuid4().hex
        response.requests = self._requests(name, parsed, given, prompts, response)
        self._prepare(response.requests, given)
        self._watch.add(response.requests[0], sender.is_cancelled, partial(self._cancel, response))
        texts = [prompts[place // parsed.sampling_params.samples].text for place in range(len(response.requests))]
        structured = parsed.sampling_params.structured_outputs
        if structured is None:
            self._complete(response.requests, texts)
        else:
            compiled = partial(self._compiled, response.requests, texts)
            try:
                self._grammars.compile(structured, compiled)
            except ShapeshiftError as error:
                compiled(error)

    def _compiled(self, requests: Sequence[Request], texts: Sequence[bytes], outcome: Template | Exception) -> None:
        """Any thread calls this, with the grammar that the requests wait for."""
        if isinstance(outcome, Exception):
            for request in requests:
                request.finish(outcome)
            self._deliver(list(requests))
            return
        for request in requests:
            request.grammar = self._grammars.new(outcome, self.loop.wake)
        self._complete(requests, texts)

    def _complete(self, requests: Sequence[Request], texts: Sequence[bytes]) -> None:
        for request, text in zip(requests, texts, strict=True):
            self._service.complete(request, text, partial(self._submit_to_loop, request))

    def _prompts(self, parsed: ParsedRequest) -> list[Prompt]:
        """The prompts as text and tokens. Raises InvalidInputError for one that is too long."""
        found = []
        for row, prompt in enumerate(parsed.prompts):
            number = row if len(parsed.prompts) > 1 else None
            if isinstance(prompt, bytes):
                found.append(
                    Prompt(prompt, self._tokenizer.encode(prompt, number, add_special_tokens=parsed.add_special_tokens))
                )
                continue
            if len(prompt) >= self._max_length:
                limit = f"at most {self._max_length - 1}, one less than max_length ({self._max_length})"
                raise InvalidInputError("input_ids", f"{len(prompt)} tokens", limit, number)
            known = (self._token_bytes[token] for token in prompt.tolist() if token < len(self._token_bytes))
            found.append(Prompt(b"".join(known), prompt))
        return found

    def _response(
        self,
        sender: ResponseSender,
        parsed: ParsedRequest,
        given: RequestParameters,
        outputs: AnswerOutputs,
        prompts: Sequence[Prompt],
    ) -> GenerationResponse:
        respond = error_codes.with_code if given.forwarded else error_codes.error_response
        steps = (respond, self._finishing, self._finished, self._cancel)
        echo = [prompt.text for prompt in prompts] if parsed.echo else []
        params = parsed.sampling_params
        if params.num_beams > 1:
            end, table = self.loop.end, self._token_bytes
            return BeamsResponse(
                self._pb_utils, sender, outputs, *steps, echo, params=params, end=end, token_bytes=table
            )
        if len(prompts) * params.samples == 1:
            return GenerationResponse(self._pb_utils, sender, outputs, *steps, echo)
        return ChoicesResponse(self._pb_utils, sender, outputs, *steps, echo, params=params, end=self.loop.end)

    def _requests(
        self,
        name: str,
        parsed: ParsedRequest,
        given: RequestParameters,
        prompts: Sequence[Prompt],
        response: GenerationResponse,
    ) -> list[Request]:
        """The samples of each prompt, prompt after prompt."""
        runtime, params = self._service.loaded.runtime, parsed.sampling_params
        rules = token_rules(params, self._tokenizer, runtime.vocab_size, runtime.eos_ids)
        return [
            self._service.request_type(
                name,
                prompt.ids,
                own,
                TextStream(self._token_bytes, own.stop),
                max_length=self._max_length,
                stream=parsed.stream,
                latency_ms=given.latency_ms,
                response=response,
                rules=rules,
            )
            for prompt in prompts
            for own in sample_params(params)
        ]

    def _prepare(self, requests: Sequence[Request], given: RequestParameters) -> None:
        """Prepare and register all of them, or none."""
        for count, request in enumerate(requests):
            try:
                require_room(self.loop.slots, request)
                self._service.prepare(request, given)
            except Exception:
                for prepared in requests[:count]:
                    self._service.forget(prepared)
                raise
        for request in requests:
            self._register(request)

    def _submit_to_loop(self, request: Request) -> None:
        """Any thread calls this. A refusal is the request's last response."""
        try:
            self.loop.submit(request)
        except Exception:  # noqa: BLE001  whatever it is, the loop has finished the request with it
            self._deliver([request])

    def _stop(self, stop_id: str, triton_request: InferenceRequest, sender: ResponseSender) -> None:
        """End the requests of that id; the stop request itself gets an empty text."""
        with self._lock:
            stopped = list(self._live.get(stop_id, ()))
        if not stopped:
            raise NotFoundError(f"stop_id: no request {stop_id!r} waits or runs")
        for request in stopped:
            self.loop.end(request, ABORT)
        nothing = partial(self._nothing, triton_request.requested_output_names())
        self._responder.post([SingleResponse(sender, nothing, partial(self._responder.count, "OK"))])

    def _nothing(self, requested: Iterable[str]) -> InferenceResponse:
        tensors = [self._pb_utils.Tensor(TEXT, np.array([b""], dtype=object))] if TEXT in requested else []
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _deliver(self, requests: list[Request]) -> None:
        self._responder.post(list(dict.fromkeys(request.response for request in requests)))

    def _cancel(self, response: GenerationResponse) -> None:
        for request in response.requests:
            self.loop.end(request, CancelledRequestError("the caller cancelled the request"))

    def _finishing(self, response: GenerationResponse) -> None:
        self._watch.remove(response.requests[0])

    def _finished(self, response: GenerationResponse) -> None:
        for request in response.requests:
            self._forget(request)
        if response.error is None:
            self._responder.count("OK", response.requests[0].arrived)
        else:
            self._responder.count(error_codes.code_name(response.error))

    def _register(self, request: Request) -> None:
        with self._lock:
            self._live.setdefault(request.id, []).append(request)

    def _forget(self, request: Request) -> None:
        self._service.forget(request)
        with self._lock:
            others = [other for other in self._live.pop(request.id, ()) if other is not request]
            if others:
                self._live[request.id] = others

    def _unread_tokens(self) -> float:
        """Prompt tokens to be computed before every request here has its first token. Any thread."""
        with self._lock:
            live = [request for requests in self._live.values() for request in requests]
        cached = self.loop.slots.cached
        unread = 0
        for request in live:
            if not request.generated and not request.is_finished:
                slot = request.slot
                unread += max(0, len(request.prompt) - (0 if slot is None else int(cached[slot])))
        return float(unread)

    def _exported(self) -> list[Any]:
        loop = self.loop
        steps = [*self._responder.steps, loop.steps, *self._entry.steps]
        return [
            *self._request_metrics.exported,
            *loop.metrics.exported,
            Gauge("requests_waiting", "Requests that wait for a slot", lambda: len(loop.admission)),
            Gauge("requests_running", "Requests that hold a slot", lambda: loop.slots.requests),
            Gauge("slots", "Number of slots", lambda: len(loop.slots)),
            Gauge("kv_cache_usage", "Share of the cache that requests hold", lambda: loop.slots.pool.usage),
            Gauge("slot_tokens", "Tokens that the slots hold", lambda: int(loop.slots.cached.sum())),
            *self._service.exported(),
            *self._entry.metrics,
            Liveness(lambda: steps, self._log).metric,
        ]
