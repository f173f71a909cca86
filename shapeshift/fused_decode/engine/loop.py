"""The decode loop: all running requests share each iteration of the model (Flover, Algorithm 2).

A device computes while this process goes on. There the next step is launched before the last one's tokens are read,
which stay on the device and feed it; texts and answers are made while it runs. What the last step ends has one row too
many in the next, which is dropped.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from shapeshift.errors import EngineError, OverloadedError
from shapeshift.fused_decode.engine.batching import Step, note_chunks, score
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.sampling.sampler import Sampler
from shapeshift.fused_decode.engine.scheduler import Deliver, Launched, LoopMetrics, Outbox, Scheduler
from shapeshift.fused_decode.engine.slots import Slots, SlotTable
from shapeshift.fused_decode.interfaces import Runtime
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.fused_decode.request import Reason, Request, Terminations
from shapeshift.serving.bounds import unloading
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.model_args import Log

STREAM_RESPONSES = 16
_RETRY_S = 0.02
_DISPLACED = "queue_requests: a request of a more urgent slo_class took the place of this one; retry later"


class DecodeLoop:
    """One thread that schedules, runs, samples and records, iteration after iteration, while there is a request.

    deliver(requests) is called on that thread, at most three times an iteration, with the requests that have text to
    send or have finished, each of the latter once. It must neither block nor raise.

    pool              the runtime's blocks; None: all are for requests that share none
    prefill_tokens    most tokens of prompts in an iteration
    stream_responses  see `Outbox`
    speculator        a `speculation.Speculator`, which proposes tokens; None: nothing is proposed
    is_closing        whether `close` was called
    """

    def __init__(
        self,
        runtime: Runtime,
        admission: Admission[Request],
        deliver: Deliver,
        log: Log,
        *,
        pool: BlockPool | None = None,
        prefill_tokens: int = 256,
        stream_responses: int = STREAM_RESPONSES,
        speculator: Any = None,
    ) -> None:
        pool = pool or BlockPool(runtime.blocks, caching=False)
        self.admission = admission
        self.slots = SlotTable(runtime.slots, runtime.max_length, pool)
        self.metrics = LoopMetrics()
        self.steps = StepCounter("decode", lambda: len(admission) > 0 or self.slots.used > 0, runtime.longest_step_s)
        self._outbox = Outbox(deliver, stream_responses)
        self.scheduler = Scheduler(
            runtime,
            self.slots,
            admission,
            self._outbox,
            self.metrics,
            prefill_tokens,
        )
        self._runtime = runtime
        self._sampler = Sampler(self.slots.sampling)
        self._speculator = speculator
        self._log = log
        self.terminations = Terminations()
        self._in_flight: Launched | None = None
        self._waited = 0.0
        self.is_closing = False
        self._wake = threading.Event()
        self.thread = threading.Thread(target=self._serve, name="decode", daemon=True)

    # For any thread.

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def submit(self, request: Request) -> None:
        """Queue `request` for a slot. Raises OverloadedError where the admission refuses it; it is finished then.

        One of a less urgent class whose place it takes ends as if it were refused.
        """
        try:
            displaced = self.admission.submit(request)
        except Exception as error:
            request.finish(error)
            raise
        request.is_submitted = True
        self.terminations.watch_deadline(request)
        if displaced is not None:
            self.terminations.add(displaced, OverloadedError(_DISPLACED))
        self._wake.set()

    def end(self, request: Request, reason: Reason) -> None:
        """End `request` early; it finishes within one iteration, at the earliest after its submission."""
        self.terminations.add(request, reason)
        self._wake.set()

    def wake(self) -> None:
        """Ask the admission again: a waiting request may fit now."""
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """End all requests with UNAVAILABLE, then end the thread."""
        self.is_closing = True
        self._wake.set()
        self.thread.join(timeout_s)

    # For the generating thread alone.

    def step(self) -> bool:
        """One iteration: schedule, run, sample, postprocess; False where there was nothing to do."""
        start = time.monotonic()
        scheduler, self._waited = self.scheduler, 0.0
        self._end_due(start)
        if not self._runtime.ready():
            self._outbox.deliver_urgent()
            return False

        if squashed := self.admission.squash():
            self._settle()
        scheduler.begin_iteration(squashed)
        if self._in_flight is not None and not scheduler.may_follow():
            self._settle()
        step = scheduler.schedule(start, None if self._speculator is None else self._speculator.draft)
        if step is not None and not self._runs_ahead(step) and self._settle():
            step = scheduler.compose()
        if step is None:
            return self._settle()

        running = time.monotonic()
        logits = self._runtime.forward(step.batch)
        note_chunks(step, self.slots)

        sampling = time.monotonic()
        launched = self._sample(step, logits)

        recording = time.monotonic()
        # The step before, which the model has ended; then this one, unless the next follows it at once.
        self._settle()
        self._in_flight = launched
        if not launched.is_ahead:
            self._settle()
        end = time.monotonic()
        self.metrics.observe_iteration(start, running, sampling, recording, end, self._waited)
        if self._speculator is not None and step.decoding == len(step.slots):
            self._speculator.observe(len(step.batch.tokens), end - start, has_beams=launched.rows is not None)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when slots, blocks, prefills and queue contradict one another."""
        self.slots.check_integrity(self.scheduler.prefilling)
        self.admission.check_integrity()

    def fail(self, error: Exception) -> None:
        """End all running requests with `error`; nothing that slots, cache or a step in flight hold is used again."""
        self._in_flight = None
        self.scheduler.finish_running(error)

    def _serve(self) -> None:
        while not self.is_closing:
            try:
                while not self.is_closing and self._counted_step():
                    pass
                self.check_integrity()
                # A request that waits while nothing runs is blocked by memory or its deadline, not by a slot; one with
                # a slot by its mask, which wakes the loop, or comes too late.
                self._wake.wait(_RETRY_S if len(self.admission) or self.slots.used else None)
                # Before the next step looks for work: whatever comes after that look sets it again.
                self._wake.clear()
            except Exception as error:  # noqa: BLE001  a failure costs the running requests, not the loop
                self._log(f"an iteration failed, its requests are lost: {type(error).__name__}: {error}")
                self.fail(EngineError(f"the decode loop failed: {error}"))
        for request in self.admission.close():
            self.scheduler.finish(request, unloading())
        self.fail(unloading())

    def _counted_step(self) -> bool:
        with self.steps.running():
            return self.step()

    def _end_due(self, now: float) -> None:
        self.scheduler.end(self.terminations.due(now), now)

    def _runs_ahead(self, step: Step) -> bool:
        """Whether another step may be in flight when this one is launched, and this one when the next is."""
        if self._runtime.feed is None or self._speculator is not None or step.scored:
            return False
        return not self.slots.beams

    def _sample(self, step: Step, logits: torch.Tensor) -> Launched:
        """Choose the tokens of a step that the model has been given; the slots advance where the next may follow it."""
        table, count, rows = self.slots, len(step.chosen), None
        sampled, slots, places = logits[:count] if step.scored else logits, step.chosen, step.places
        if table.beams and table.is_beam[slots].any():
            rows = self.scheduler.beams.choose(sampled, slots)
            sampled, slots, places = sampled[torch.from_numpy(rows)], slots[rows], places[rows]
        if table.sampling.edits.guided:
            step = step.without(self._late(step.chosen, logits))
        choice = self._sampler.choose(sampled, slots, places, is_plain=count == step.rows)
        if step.scored:
            score(step.scored, logits[count:])
        is_ahead = self._runs_ahead(step)
        owners = [table.owners[slot] for slot in step.chosen.tolist()] if is_ahead else []
        launched = Launched(step, owners, rows, choice, is_ahead)
        if is_ahead:
            assert self._runtime.feed is not None
            self._runtime.feed(choice.tokens)
            self.scheduler.advance(launched)
        return launched

    def _late(self, chosen: Slots, logits: torch.Tensor) -> Slots:
        """The places of the `chosen` slots whose masks have not come when the model has ended."""
        edits = self.slots.sampling.edits
        if logits.is_cuda and not edits.are_ready(chosen):
            torch.cuda.current_stream(logits.device).synchronize()
        return edits.late(chosen)

    def _settle(self) -> bool:
        """Wait for the step in flight and record it; False where there is none."""
        if self._in_flight is None:
            return False
        launched, self._in_flight = self._in_flight, None
        start = time.monotonic()
        launched.choice.wait()
        now = time.monotonic()
        self._waited += now - start
        self.scheduler.postprocess(launched, now)
        self._end_due(now)
        self._outbox.deliver_step()
        return True
