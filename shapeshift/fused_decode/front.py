"""The front of a model that generates: Triton requests in, text out as it comes."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Some
from functools import partial
from typing import Any

import numpy as np

from shapeshift.errors import CancelledRequestError, NotFoundError
from shapeshift.fused_decode.answer import TEXT, Answer
from shapeshift.fused_decode.detokenize import TextStream
from shapeshift.fused_decode.fields import FieldReader
from shapeshift.fused_decode.loop import DecodeLoop
from shapeshift.fused_decode.room import Room
from shapeshift.fused_decode.sequence import ABORT, Sequence
from shapeshift.serving import log, parameters, replies
from shapeshift.serving.cancellations import CancellationWatch
from shapeshift.serving.log import Log
from shapeshift.serving.metrics import Gauge, MetricsFlusher, RequestMeters
from shapeshift.serving.model_args import ModelArgs
from shapeshift.serving.streams import OneResponse, StreamThread

MakeRoom = Callable[[ModelArgs, Log], Room]


class GenerateFront:
    """Owns the process' threads. `execute` never blocks and never raises; every request gets one last response."""

    def __init__(self, pb_utils: Any, args: ModelArgs, make_room: MakeRoom = Room) -> None:
        self._pb_utils = pb_utils
        self._log = log.of_model(pb_utils, args.name)
        self._room = make_room(args, self._log)
        loaded = self._room.loaded
        own, runtime = loaded.own, loaded.runtime
        self._tokenizer = loaded.tokenizer
        self._table = loaded.table
        self._max_length = runtime.max_length
        self._fields = FieldReader(pb_utils, runtime.vocab_size, self._room.sampling_parameters)
        self._live: dict[str, list[Sequence]] = {}
        self._lock = threading.Lock()
        self._sender = StreamThread(pb_utils, self._log)
        self._watch = CancellationWatch(self._log)
        self.loop = DecodeLoop(
            runtime,
            self._room.admission(),
            self._deliver,
            self._log,
            prefill_tokens=own.prefill_tokens,
            compaction=own.compaction,
            ground=self._room.ground,
        )
        self._meters = RequestMeters("prompts", own.max_length, own.slo_ms)
        self._metrics = MetricsFlusher(pb_utils, args.name, self._exported(), self._log)
        self._room.open(self.loop)
        self.loop.start()

    def execute(self, requests: Some[Any]) -> None:
        """Let every request wait for a slot; those that cannot be served are answered with an error at once."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except Exception as error:  # noqa: BLE001  one bad request must not cost the others
                self._reply_error(sender, error, _is_forwarded(request))

    def close(self) -> None:
        """Stop producers before consumers: the loop, then the sender, then metrics."""
        self._watch.close()
        self.loop.close()
        self._room.close()
        self._sender.close()
        self._metrics.close()

    def _submit(self, request: Any, sender: Any) -> None:
        stop_id = self._fields.stop_id(request)
        if stop_id is not None:
            self._stop(stop_id, request, sender)
            return
        # Before any work: what cannot be served must cost nothing.
        self.loop.admission.refuse_when_full()
        given = parameters.parse(request.parameters(), self._room.own_parameters)
        fields = self._fields.read(request)
        given = parameters.joined(given, fields.named)
        prompt = self._tokenizer.encode(fields.text)
        self._meters.lengths.observe(len(prompt))
        requested = request.requested_output_names()
        respond = replies.with_code if given.forwarded else replies.error_response
        answer = Answer(self._pb_utils, sender, fields, requested, respond, self._closing, self._ended, self._lost)
        answer.sequence = sequence = self._room.sequence(
            given,
            fields.text,
            request.request_id() or given.id or uuid.uuid4().hex,
            prompt,
            fields.parameters,
            TextStream(self._table, fields.parameters.stop),
            max_length=self._max_length,
            stream=fields.stream,
            latency_ms=given.latency_ms,
            outlet=answer,
        )
        self._register(sequence)
        self._watch.add(sequence, sender.is_cancelled, partial(self._cancel, sequence))
        try:
            self.loop.submit(sequence)
        except Exception:
            self._watch.remove(sequence)
            self._forget(sequence)
            raise

    def _stop(self, stop_id: str, request: Any, sender: Any) -> None:
        """End the requests of that id; whoever asked for it gets an empty text."""
        with self._lock:
            named = list(self._live.get(stop_id, ()))
        if not named:
            raise NotFoundError(f"stop_id: no request {stop_id!r} waits or runs")
        for sequence in named:
            self.loop.end(sequence, ABORT)
        nothing = partial(self._nothing, request.requested_output_names())
        self._sender.post([OneResponse(sender, nothing, partial(self._count, "OK"))])

    def _nothing(self, requested: Iterable[str]) -> Any:
        tensors = [self._pb_utils.Tensor(TEXT, np.array([b""], dtype=object))] if TEXT in requested else []
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _deliver(self, sequences: list[Sequence]) -> None:
        self._sender.post([sequence.outlet for sequence in sequences])

    def _reply_error(self, sender: Any, error: Exception, forwarded: bool) -> None:
        make = partial(replies.with_code if forwarded else replies.error_response, self._pb_utils, error)
        self._sender.post([OneResponse(sender, make, partial(self._count, replies.code_name(error)))])

    def _cancel(self, sequence: Sequence) -> None:
        self.loop.end(sequence, CancelledRequestError("the caller cancelled the request"))

    def _lost(self, answer: Answer) -> None:
        self._cancel(answer.sequence)

    def _closing(self, answer: Answer) -> None:
        self._watch.remove(answer.sequence)

    def _ended(self, answer: Answer) -> None:
        sequence = answer.sequence
        self._forget(sequence)
        if sequence.error is None:
            self._meters.latency_ms.observe((time.monotonic() - sequence.arrived) * 1e3)
        self._count("OK" if sequence.error is None else replies.code_name(sequence.error))

    def _count(self, code: str) -> None:
        self._meters.answered[code].add()

    def _register(self, sequence: Sequence) -> None:
        with self._lock:
            self._live.setdefault(sequence.id, []).append(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._room.forget(sequence)
        with self._lock:
            others = [other for other in self._live.pop(sequence.id, ()) if other is not sequence]
            if others:
                self._live[sequence.id] = others

    def _exported(self) -> list[Any]:
        loop = self.loop
        return [
            *self._meters.exported,
            *loop.meters.exported,
            Gauge("requests_waiting", "Requests that wait for a slot", lambda: len(loop.admission)),
            Gauge("requests_running", "Requests that hold a slot", lambda: loop.slots.used),
            Gauge("slots", "Slots that there are", lambda: len(loop.slots)),
            Gauge("slot_tokens", "Tokens that the slots hold", lambda: int(loop.slots.cached.sum())),
            *self._room.exported(),
        ]


def _is_forwarded(request: Any) -> bool:
    try:
        return json.loads(request.parameters() or "{}").get("forwarded") is True
    except (ValueError, AttributeError):
        return False
