"""The decode loop: all running requests share each iteration of the model (Flover, Algorithm 2)."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.errors import EngineError
from shapeshift.fused_decode.engine import slot_integrity
from shapeshift.fused_decode.engine.batching import Step, compose, score
from shapeshift.fused_decode.engine.beams import Beams
from shapeshift.fused_decode.engine.blocks import BlockPool
from shapeshift.fused_decode.engine.outbox import Deliver, Outbox
from shapeshift.fused_decode.engine.sampling.grammar import Grammar
from shapeshift.fused_decode.engine.sampling.sampler import Sampler
from shapeshift.fused_decode.engine.slots import SlotTable
from shapeshift.fused_decode.engine.speculation import Speculator, verify
from shapeshift.fused_decode.interfaces import Runtime
from shapeshift.fused_decode.metrics import LoopMetrics
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.fused_decode.request import LENGTH, STOP, Reason, Request, Terminations
from shapeshift.serving.bounds import unloading
from shapeshift.serving.liveness import StepCounter
from shapeshift.serving.model_args import Log

Array = npt.NDArray[Any]
_RETRY_ADMISSION_S = 0.02


class DecodeLoop:
    """One thread that decides, runs and records, iteration after iteration, while there is a request.

    deliver(requests) is called on that thread, at most twice an iteration, with the requests that have text to send
    or have finished, each of the latter once. It must neither block nor raise.
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
        self._is_eos = np.isin(np.arange(runtime.vocab_size), list(runtime.eos_ids))
        self._prefilling: dict[Request, None] = {}
        self._terminations = Terminations()
        self._outbox = Outbox(deliver, stream_responses)
        self._speculator = speculator
        self._recorded = 0.0
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
        """One iteration: decide, run, record; False where there was nothing to compute."""
        start = time.monotonic()
        if not self._runtime.ready():
            self._finish_due(start)
            self._outbox.deliver_urgent()
            return False
        step = self._decide(start)
        if step is None:
            return False
        running = time.monotonic()
        logits = self._runtime.forward(step.batch)
        sampling = time.monotonic()
        count = len(step.chosen)
        rows = self._beams.choose(logits[:count], step.chosen)
        tokens, finite = np.zeros(count, np.int64), np.ones(count, bool)
        sampled = logits[:count] if len(rows) == count else logits[torch.from_numpy(rows)]
        tokens[rows], finite[rows] = self._sampler.choose(sampled, step.chosen[rows], step.places[rows])
        score(step.scored, logits[count:])
        recording = time.monotonic()
        self._record(step, rows, tokens, finite, recording)
        end = time.monotonic()
        self.metrics.observe_iteration(start, running, sampling, recording, end)
        if self._speculator is not None and step.decoding == len(step.slots):
            self._speculator.observe(len(step.batch.tokens), end - start, has_beams=len(rows) < count)
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
                # A request that waits while nothing runs is blocked by memory or its deadline, not by a slot.
                self._wake.wait(_RETRY_ADMISSION_S if len(self.admission) else None)
                # Before the next step looks for work: whatever comes after that look sets it again.
                self._wake.clear()
            except Exception as error:  # noqa: BLE001  a failure costs the running requests, not the loop
                self._log(f"an iteration failed, its requests are lost: {type(error).__name__}: {error}")
                self._finish_running(EngineError(f"the decode loop failed: {error}"))
        for request in self.admission.close():
            self._finish(request, unloading())
        self._finish_running(unloading())

    def _counted_step(self) -> bool:
        with self.steps.running():
            return self.step()

    def _decide(self, now: float) -> Step | None:
        """End what is due, fill free slots, and compose the batch."""
        self._finish_due(now)
        for request in self.admission.squash():
            self._prefilling.pop(request, None)
            self.slots.preempt(request)
        self.slots.begin_iteration()
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
        step = compose(self.slots, self._prefilling, self._prefill_tokens) if self.slots.used else None
        self.metrics.prefix_hits.add(self.slots.pop_shared())
        return step

    def _preempt_for_growth(self) -> bool:
        """Give the running requests the blocks that they need now; whether that took the slots of others."""
        preempted = self.slots.grow()
        for request in preempted:
            self._prefilling.pop(request, None)
            self.admission.preempted(request)
            self.metrics.preemptions.add()
        return bool(preempted)

    def _record(self, step: Step, rows: Array, tokens: Array, finite: Array, now: float) -> None:
        """Store the new tokens and finish the requests that are complete.

        rows: the tokens to choose that the sampler has chosen; the others are those of beams.
        """
        table, generated = self.slots, len(step.chosen) - len(rows)
        logprobs = {int(rows[place]): found for place, found in self._sampler.logprobs.items()}
        verified = verify(step, table, tokens)
        taken = verified.taken[np.isin(verified.taken, rows)]
        slots, places, tokens = step.chosen[taken], step.places[taken], tokens[taken]
        table.advance(step.slots, verified.lengths, slots, places, tokens)
        eos = self._is_eos[tokens] & ~table.ignore_eos[slots]
        full = places + 1 >= table.end[slots]
        columns = (taken, slots, tokens, eos, full, finite[taken])
        for place, slot, token, is_eos, is_full, is_finite in zip(*(one.tolist() for one in columns), strict=True):
            request = table.owners[slot]
            if request is None:
                # Its answer has ended with an earlier one of these tokens.
                continue
            generated += 1
            self._note_token(request, now)
            request.token_ids.append(token)
            if place in logprobs:
                request.logprobs.append(logprobs[place])
            request.generated += 1
            if not is_finite:
                self._finish(request, EngineError("the model's logits are not finite"))
            elif is_eos or token in request.sampling_params.stop_token_ids or self._append_text(request, token):
                self._finish(request, STOP)
            elif request.grammar is not None and (ended := _ended(request.grammar, token)) is not None:
                self._finish(request, ended)
            elif is_full:
                self._finish(request, LENGTH)
        for request, reason in self._beams.advance():
            self._note_token(request, now)
            request.generated += 1
            if reason is not None:
                self._finish(request, reason)
        self._count_tokens(step, generated, verified.accepted, now)
        self._finish_due(now)
        self._outbox.deliver_step()

    def _note_token(self, request: Request, now: float) -> None:
        """`request` is about to get a token: its prompt is complete."""
        self._prefilling.pop(request, None)
        if not request.generated:
            request.first_token = now
            self.metrics.first_token_ms.observe((now - request.arrived) * 1e3)

    def _count_tokens(self, step: Step, generated: int, accepted: int, now: float) -> None:
        prompt_tokens, rows = int(step.lengths[step.decoding :].sum()), len(step.batch.wanted)
        self.metrics.observe_tokens(prompt_tokens, generated, len(step.chosen) - rows, accepted)
        if step.decoding:
            # Every decoding request got its last token when the previous iteration was recorded.
            self.metrics.between_tokens_ms.observe((now - self._recorded) * 1e3, step.decoding)
            # Several tokens of one request come at once.
            self.metrics.between_tokens_ms.observe(0.0, generated - rows)
        self._recorded = now

    def _append_text(self, request: Request, token: int) -> bool:
        """Add a token's text to the answer; True where it completes a stop string."""
        text = request.text.add(token)
        if text:
            request.parts.append(text)
            if request.stream:
                self._outbox.add(request)
        return request.text.stopped

    def _finish_due(self, now: float) -> None:
        for request, reason in self._terminations.due(now):
            if not request.is_finished:
                self._finish(request, reason)

    def _finish(self, request: Request, reason: Reason) -> None:
        """End `request`, whether it waits or runs."""
        if request.slot is None:
            self.admission.withdraw(request)
        else:
            self.slots.release(request)
            self.admission.finished(request)
            self._prefilling.pop(request, None)
        request.finish(reason)
        self._outbox.add(request)

    def _finish_running(self, error: Exception) -> None:
        """End all running requests with `error`; afterwards all slots are free, whatever their state was.

        Nothing that the cache holds is used again: whatever failed may have lost it.
        """
        running = dict.fromkeys(owner for owner in self.slots.owners if owner is not None) | self._prefilling
        self.slots.clear()
        self._prefilling.clear()
        for request in running:
            self.admission.finished(request)
            if not request.is_finished:
                request.finish(error)
                self._outbox.add(request)
        self._outbox.deliver_urgent()


def _ended(grammar: Grammar, token: int) -> Reason | None:
    """Why an answer ends with `token`, as its grammar has it; None where it goes on."""
    try:
        return STOP if grammar.accept(token) else None
    except Exception as error:  # noqa: BLE001  one request's grammar must not cost the others
        return error
