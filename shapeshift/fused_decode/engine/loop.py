"""The decode loop: all running requests share each iteration of the model (Flover, Algorithm 2).

A device computes while this process goes on. There the next step is launched before the last one's tokens are read,
which stay on the device and feed it; texts and answers are made while it runs. What the last step ends has one row too
many in the next, which is dropped.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from shapeshift.errors import EngineError
from shapeshift.fused_decode.engine import slot_integrity
from shapeshift.fused_decode.engine.batching import Step, compose, note_chunks, score
from shapeshift.fused_decode.engine.beams import Beams
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.recorder import Deliver, Launched, Outbox, Recorder
from shapeshift.fused_decode.engine.sampling.sampler import Sampler
from shapeshift.fused_decode.engine.slots import Slots, SlotTable
from shapeshift.fused_decode.engine.speculation import Speculator
from shapeshift.fused_decode.interfaces import Runtime
from shapeshift.fused_decode.metrics import LoopMetrics
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.fused_decode.request import Reason, Request, Terminations
from shapeshift.serving.bounds import unloading
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.model_args import Log

_RETRY_S = 0.02


class DecodeLoop:
    """One thread that decides, runs and records, iteration after iteration, while there is a request.

    deliver(requests) is called on that thread, at most three times an iteration, with the requests that have text to
    send or have finished, each of the latter once. It must neither block nor raise.
    """

    def __init__(
        self,
        runtime: Runtime,
        admission: Admission[Request],
        deliver: Deliver,
        log: Log,
        *,
        prefill_tokens: int = 256,
        pool: BlockPool | None = None,
        longest_step_s: float = 0.0,
        stream_responses: int = 0,
        speculator: Speculator | None = None,
    ) -> None:
        """pool: the runtime's blocks; None: all are for requests that share none. longest_step_s: see `StepCounter`.

        stream_responses: see `Outbox`. speculator: proposes tokens; None: nothing is proposed.
        """
        self.admission = admission
        self.slots = SlotTable(runtime.slots, runtime.max_length, pool or BlockPool(runtime.blocks, caching=False))
        self.metrics = LoopMetrics()
        self.steps = StepCounter("decode", lambda: len(admission) > 0 or self.slots.used > 0, longest_step_s)
        self._runtime = runtime
        self._sampler = Sampler(self.slots.sampling, runtime.vocab_size)
        self._beams = Beams(self.slots, runtime)
        self._log = log
        self._prefill_tokens = prefill_tokens
        self._prefilling: dict[Request, None] = {}
        self._terminations = Terminations()
        self._outbox = Outbox(deliver, stream_responses)
        self._recorder = Recorder(
            runtime, self.slots, admission, self._beams, self._prefilling, self._outbox, self.metrics
        )
        self._speculator = speculator
        self._in_flight: Launched | None = None
        self._waited = 0.0
        self._closing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="decode", daemon=True)

    # For any thread.

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue `request` for a slot. Raises OverloadedError where the admission refuses it; it is finished then."""
        try:
            self.admission.submit(request)
        except Exception as error:
            request.finish(error)
            raise
        request.is_submitted = True
        self._terminations.watch_deadline(request)
        self._wake.set()

    def end(self, request: Request, reason: Reason) -> None:
        """End `request` early; it finishes within one iteration, at the earliest after its submission."""
        self._terminations.add(request, reason)
        self._wake.set()

    def wake(self) -> None:
        """Ask the admission again: a waiting request may fit now."""
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """End all requests with UNAVAILABLE, then end the thread."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    # For the generating thread alone.

    def step(self) -> bool:
        """One iteration: decide, launch, record; False where there was nothing to do."""
        start = time.monotonic()
        if not self._runtime.ready():
            self._finish_due(start)
            self._outbox.deliver_urgent()
            return False
        self._waited = 0.0
        step = self._decide(start)
        if step is None:
            return self._settle()
        running = time.monotonic()
        logits = self._runtime.forward(step.batch)
        note_chunks(step, self.slots)
        sampling = time.monotonic()
        launched = self._choose(step, logits)
        recording = time.monotonic()
        self._settle()
        self._in_flight = launched
        if not launched.is_ahead:
            self._settle()
        end = time.monotonic()
        self.metrics.observe_iteration(start, running, sampling, recording, end, self._waited)
        if self._speculator is not None and step.decoding == len(step.slots):
            self._speculator.observe(
                len(step.batch.tokens), end - start, has_beams=len(launched.rows) < len(step.chosen)
            )
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError when slots, blocks, prefills and queue contradict one another."""
        slot_integrity.check(self.slots, self._prefilling)
        self.admission.check_integrity()

    def _serve(self) -> None:
        while not self._closing:
            try:
                while not self._closing and self._counted_step():
                    pass
                self.check_integrity()
                # A request that waits while nothing runs is blocked by memory or its deadline, not by a slot; one with
                # a slot by its mask, which wakes the loop, or comes too late.
                self._wake.wait(_RETRY_S if len(self.admission) or self.slots.used else None)
                # Before the next step looks for work: whatever comes after that look sets it again.
                self._wake.clear()
            except Exception as error:  # noqa: BLE001  a failure costs the running requests, not the loop
                self._log(f"an iteration failed, its requests are lost: {type(error).__name__}: {error}")
                self._finish_running(EngineError(f"the decode loop failed: {error}"))
        for request in self.admission.close():
            self._recorder.finish(request, unloading())
        self._finish_running(unloading())

    def _counted_step(self) -> bool:
        with self.steps.running():
            return self.step()

    def _decide(self, now: float) -> Step | None:
        """End what is due, fill free slots, and compose the batch."""
        shared = self.slots.shared_tokens
        self._finish_due(now)
        for request in self.admission.squash():
            self._settle()
            # The step that was in flight may have been its last.
            if request.slot is not None:
                self._prefilling.pop(request, None)
                self.slots.preempt(request)
        self.slots.begin_iteration()
        if self._in_flight is not None and not self._may_follow():
            self._settle()
        if not self._preempt_for_growth():
            admitted = self.admission.admit(self.slots.free, self.slots.fits)
            # Before any of them gets a slot: should that fail, none may be lost.
            self._prefilling |= dict.fromkeys(admitted)
            for request in admitted:
                request.admitted = request.admitted or now
                self.metrics.prefix_queries.add(self.slots.allocate(request))
        self._outbox.deliver_urgent()
        self._beams.resume(self._prefilling)
        if self._speculator is not None and not self._prefilling:
            self._speculator.draft(self.slots)
        step = self._compose()
        if step is not None and not self._runs_ahead(step) and self._settle():
            step = self._compose()
        self.metrics.prefix_hits.add(self.slots.shared_tokens - shared)
        return step

    def _may_follow(self) -> bool:
        """Whether the next step can be decided without the tokens of the one in flight."""
        table = self.slots
        return table.can_grow and not table.is_beam.any() and not table.sampling.edits.rows(table.decoding).size

    def _compose(self) -> Step | None:
        return compose(self.slots, self._prefilling, self._prefill_tokens) if self.slots.used else None

    def _runs_ahead(self, step: Step) -> bool:
        """Whether another step may be in flight when this one is launched, and this one when the next is."""
        if self._runtime.feed is None or self._speculator is not None or step.scored:
            return False
        return not self.slots.is_beam[step.slots].any()

    def _choose(self, step: Step, logits: torch.Tensor) -> Launched:
        """Choose the tokens of a step that the model has been given; the slots advance where the next may follow it."""
        table, count = self.slots, len(step.chosen)
        rows = self._beams.choose(logits[:count], step.chosen)
        late = self._late(step.chosen, logits)
        step = step.without(late)
        sampled = logits[:count] if len(rows) == count else logits[torch.from_numpy(rows)]
        choice = self._sampler.choose(sampled, step.chosen[rows], step.places[rows])
        score(step.scored, logits[count:])
        is_ahead = self._runs_ahead(step)
        owners = [owner for slot in step.chosen.tolist() if (owner := table.owners[slot])] if is_ahead else []
        if is_ahead:
            assert self._runtime.feed is not None
            self._runtime.feed(choice.tokens)
            comes = np.setdiff1d(np.arange(count), step.late)
            table.advance(step.slots, step.lengths, step.chosen[comes], step.places[comes], None)
            for place in comes.tolist():
                self._prefilling.pop(owners[place], None)
        return Launched(step, owners, rows, choice, is_ahead)

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
        self._recorder.record(launched, now)
        self._finish_due(now)
        self._outbox.deliver_step()
        return True

    def _preempt_for_growth(self) -> bool:
        """Give the running requests the blocks that they need now; whether that took the slots of others."""
        preempted = self.slots.grow()
        for request in preempted:
            self._prefilling.pop(request, None)
            self.admission.preempted(request)
            self.metrics.preemptions.add()
        return bool(preempted)

    def _finish_due(self, now: float) -> None:
        table = self.slots
        self._recorder.end(self._terminations.due(now))
        failures = table.sampling.edits.failures(np.flatnonzero(table.phase), now)
        self._recorder.end((owner, error) for slot, error in failures if (owner := table.owners[slot]) is not None)

    def _finish_running(self, error: Exception) -> None:
        self._in_flight = None
        self._recorder.finish_running(error)
