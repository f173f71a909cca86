"""The scheduler: which requests are in the next iteration, and what its tokens change for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shapeshift.errors import EngineError
from shapeshift.fused_decode.engine.batching import Step, alike, compose, follow, verify
from shapeshift.fused_decode.engine.sampling.sampler import Choice
from shapeshift.fused_decode.engine.slots import FAILED, Slots, SlotTable
from shapeshift.fused_decode.interfaces import Runtime
from shapeshift.fused_decode.policy.admission import Admission
from shapeshift.fused_decode.request import LENGTH, STOP, Reason, Request
from shapeshift.serving import events
from shapeshift.serving.metrics import Counter, Histogram
from shapeshift.settings import Choices

Deliver = Callable[[list[Request]], None]

_ITERATION_MS = (1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)
_FIRST_TOKEN_MS = (5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10000, 30000)
MODEL, SAMPLING, REST = "model", "sampling", "rest"

BEAMS: Choices[Any] = Choices("num_beams", {"beams": "shapeshift.fused_decode.engine.beam_search:Beams"})
"""What chooses the tokens of requests with beam search, see `beam_search.Beams`."""


@dataclass(frozen=True)
class Launched:
    """A step that the model has been given.

    owners    the requests of `step.chosen`, where it is ahead
    rows      INT64 [n]  those of `step.chosen` that the sampler chooses; the others are beams'. None: all
    choice    their tokens
    is_ahead  whether the slots have been advanced already, so that the next step may be launched before it is recorded
    """

    step: Step
    owners: list[Request | None]
    rows: Slots | None
    choice: Choice
    is_ahead: bool


class Outbox:
    """The requests with something to send. Only the generating thread uses it.

    deliver            takes requests, each at most once a call; must neither block nor raise
    responses_a_step   most requests that are delivered after one step for their further tokens; 0: any number. Those
                       that have waited longest go first, and what gathers meanwhile leaves with them. First and last
                       texts count too, but half of the responses are for further tokens, however many there are

    A response takes a thread of the front, the server and the client from their cores to the next wait, and each core
    that the model lacks for a moment makes the others wait for it.
    """

    def __init__(self, deliver: Deliver, responses_a_step: int = 0) -> None:
        self._deliver = deliver
        self._responses_a_step = responses_a_step
        self._urgent: dict[Request, None] = {}
        self._waiting: dict[Request, None] = {}

    def add(self, request: Request) -> None:
        """`request` has new text to send, or has finished."""
        if request.is_finished or len(request.parts) == 1:
            self._waiting.pop(request, None)
            self._urgent[request] = None
        elif request not in self._urgent:
            self._waiting[request] = None

    def deliver_urgent(self) -> None:
        """Deliver the requests that have finished or have their first text."""
        if self._urgent:
            self._deliver(list(self._urgent))
            self._urgent.clear()

    def deliver_step(self) -> None:
        """Deliver after a step: what is urgent, and further tokens of as many requests as may be."""
        most = self._responses_a_step
        left = max(most - len(self._urgent), (most + 1) // 2) if most else len(self._waiting)
        for request in list(self._waiting)[:left]:
            del self._waiting[request]
            self._urgent[request] = None
        self.deliver_urgent()


class Scheduler:
    """Gives requests slots, composes the batches, and gives the requests their tokens. Only the generating thread.

    prefilling: requests whose prompts are not complete in the cache, in order of admission.
    """

    def __init__(
        self,
        runtime: Runtime,
        table: SlotTable,
        admission: Admission[Request],
        outbox: Outbox,
        metrics: LoopMetrics,
        prefill_tokens: int,
    ) -> None:
        self.prefilling: dict[Request, None] = {}
        self._runtime = runtime
        self._table = table
        self._admission = admission
        self._outbox = outbox
        self._metrics = metrics
        self._prefill_tokens = prefill_tokens
        self._eos_ids = runtime.eos_ids
        self._shared = 0
        self._recorded = 0.0
        self._composed: Step | None = None

    @cached_property
    def beams(self) -> Any:
        """See `BEAMS`."""
        return BEAMS["beams"](self._table, self._runtime)

    def begin_iteration(self, squashed: Iterable[Request]) -> None:
        """An iteration begins, for which these running requests lose their slots."""
        for request in squashed:
            # The step that was in flight may have been its last.
            if request.slot is not None:
                self.prefilling.pop(request, None)
                self._table.preempt(request)
        self._table.begin_iteration()

    def may_follow(self) -> bool:
        """Whether the next step can be decided without the tokens of the one in flight."""
        table = self._table
        return table.can_grow and not table.beams and not table.sampling.edits.rows(table.decoding).size

    def schedule(self, now: float, draft: Callable[[SlotTable], None] | None) -> Step | None:
        """Give the running requests blocks and waiting ones the free slots; the next step, None where there is none.

        draft: proposes tokens; None: nothing is proposed.
        """
        if not self._preempt_for_growth():
            admitted = self._admission.admit(self._table.free, self._table.fits, self._table.shared_with_others)
            # Before any of them gets a slot: should that fail, none may be lost.
            self.prefilling |= dict.fromkeys(admitted)
            for request in admitted:
                request.admitted = request.admitted or now
                self._metrics.prefix_queries.add(self._table.allocate(request))
        self._outbox.deliver_urgent()
        if self._table.beams:
            self.beams.resume(self.prefilling)
        if draft is not None and not self.prefilling:
            draft(self._table)
        return self.compose()

    def compose(self) -> Step | None:
        """The step of what has slots now; where nothing has changed, the last one again, a token further."""
        table = self._table
        if table.alike:
            assert self._composed is not None
            table.alike -= 1
            follow(self._composed, table)
            return self._composed
        step = compose(table, self.prefilling, self._prefill_tokens) if table.used else None
        self._composed = step
        # A device may still read the last step while the next one is made.
        if step is not None and self._runtime.feed is None and not (self.prefilling or table.beams):
            table.alike = alike(step, table)
        shared, self._shared = self._shared, table.shared_tokens
        self._metrics.prefix_hits.add(self._shared - shared)
        return step

    def advance(self, launched: Launched) -> None:
        """Another step follows `launched` before it is recorded: its tokens are there, but not known yet."""
        step = launched.step
        comes = np.setdiff1d(np.arange(len(step.chosen)), step.late)
        self._table.advance(step.slots, step.lengths, step.chosen[comes], step.places[comes], None)
        for place in comes.tolist():
            owner = launched.owners[place]
            assert owner is not None
            self.prefilling.pop(owner, None)

    def postprocess(self, launched: Launched, now: float) -> None:
        """Store the tokens of a step that has ended, and finish the requests that are complete.

        A request that has ended, or left its slot, since the step was launched gets none.
        """
        table, step, result = self._table, launched.step, launched.choice.result()
        count, accepted = len(step.chosen), 0
        beams = 0 if launched.rows is None else count - len(launched.rows)
        taken: Sequence[int] = range(count)
        if table.alike:
            table.advance(step.slots, step.lengths, step.chosen, step.places, result.ids)
        else:
            if launched.rows is not None:
                result = result.put(launched.rows, np.zeros(count, np.int64), np.ones(count, bool))
            taken, accepted = self._record(launched, result.ids)
        generated, slots, tokens, finite = beams, step.chosen.tolist(), result.ids.tolist(), result.finite.tolist()
        for place in taken:
            request, token = table.owners[slots[place]], tokens[place]
            if request is None:
                # Its answer has ended with an earlier one of these tokens.
                continue
            generated += 1
            self._note_token(request, now)
            request.token_ids.append(token)
            if place in result.logprobs:
                request.logprobs.append(result.logprobs[place])
            request.generated += 1
            params = request.sampling_params
            is_eos = token in self._eos_ids and not params.ignore_eos
            if not finite[place]:
                self.finish(request, EngineError("the model's logits are not finite"))
            elif is_eos or token in params.stop_token_ids or self._append_text(request, token):
                self.finish(request, STOP)
            elif request.grammar is not None and (ended := _ended(request.grammar, token)) is not None:
                self.finish(request, ended)
            elif request.generated >= request.limit:
                self.finish(request, LENGTH)
        if beams:
            for request, reason in self.beams.advance():
                self._note_token(request, now)
                request.generated += 1
                if reason is not None:
                    self.finish(request, reason)
        self._count_tokens(step, generated, accepted, now)

    def _record(self, launched: Launched, tokens: Slots) -> tuple[list[int], int]:
        """Give the slots the tokens that were chosen, INT64 [tokens to choose]; which of them are new tokens of
        requests, and how many of these were proposed."""
        table, step = self._table, launched.step
        verified = verify(step, table, tokens)
        is_sampled = (
            np.ones(len(tokens), bool) if launched.rows is None else np.isin(np.arange(len(tokens)), launched.rows)
        )
        is_sampled[step.late] = False
        taken = verified.taken[is_sampled[verified.taken]]
        if launched.is_ahead:
            taken = taken[[table.owners[step.chosen[place]] is launched.owners[place] for place in taken]]
            table.settle(step.chosen[taken], step.places[taken], tokens[taken])
        else:
            table.advance(step.slots, verified.lengths, step.chosen[taken], step.places[taken], tokens[taken])
        return taken.tolist(), verified.accepted

    def end(self, due: Iterable[tuple[Request, Reason]], now: float) -> None:
        """Finish these requests, each for its first reason, and those whose grammars have failed."""
        table = self._table
        for request, reason in due:
            if not request.is_finished:
                self.finish(request, reason)
        for slot, error in table.sampling.edits.failures(now):
            owner = table.owners[slot]
            if owner is not None:
                self.finish(owner, error)

    def finish(self, request: Request, reason: Reason) -> None:
        """End `request`, whether it waits or runs."""
        if request.slot is None:
            self._admission.withdraw(request)
        else:
            self._table.release(request, FAILED if isinstance(reason, Exception) else reason)
            self.prefilling.pop(request, None)
            self._leave(request)
        request.finish(reason)
        self._outbox.add(request)

    def finish_running(self, error: Exception) -> None:
        """End all running requests with `error`; afterwards all slots are free, whatever their state was.

        Nothing that the cache holds is used again: whatever failed may have lost it.
        """
        running = dict.fromkeys(owner for owner in self._table.owners if owner is not None) | self.prefilling
        self._table.clear()
        self.prefilling.clear()
        for request in running:
            self._leave(request)
            if not request.is_finished:
                request.finish(error)
                self._outbox.add(request)
        self._outbox.deliver_urgent()

    def _leave(self, request: Request) -> None:
        """`request`, which has or had a slot, ends. One that is squashed while a step is in flight waits again, and
        has its slot still."""
        if not self._admission.withdraw(request):
            self._admission.finished(request)

    def _preempt_for_growth(self) -> bool:
        """Give the running requests the blocks that they need now; whether that took the slots of others."""
        preempted = self._table.grow()
        for request in preempted:
            self.prefilling.pop(request, None)
            self._admission.preempted(request)
            self._metrics.preemptions.add()
        return bool(preempted)

    def _note_token(self, request: Request, now: float) -> None:
        """`request` is about to get a token: its prompt is complete."""
        if request.generated == request.joined_with:
            self.prefilling.pop(request, None)
            if not request.generated:
                request.first_token = now
                self._metrics.first_token_ms.observe((now - request.arrived) * 1e3)
            events.record("first", slot=request.slot)

    def _append_text(self, request: Request, token: int) -> bool:
        """Add a token's text to the answer; True where it completes a stop string."""
        text = request.text.add(token)
        if text:
            request.parts.append(text)
            if request.stream:
                self._outbox.add(request)
        return request.text.stopped is not None

    def _count_tokens(self, step: Step, generated: int, accepted: int, now: float) -> None:
        rows = step.rows
        prompt_tokens = int(step.lengths[step.decoding :].sum()) if step.decoding < len(step.slots) else 0
        self._metrics.observe_tokens(prompt_tokens, generated, len(step.chosen) - rows, accepted)
        # Of rows that have ended since they were launched nothing comes.
        decoding = step.decoding - max(rows - generated, 0)
        if decoding > 0:
            # Every decoding request got its last token when the previous iteration was recorded.
            self._metrics.between_tokens_ms.observe((now - self._recorded) * 1e3, decoding)
        # Several tokens of one request come at once.
        if step.decoding and generated > rows:
            self._metrics.between_tokens_ms.observe(0.0, generated - rows)
        self._recorded = now


def _ended(grammar: Any, token: int) -> Reason | None:
    """Why an answer ends with `token`, as its grammar has it; None where it goes on."""
    try:
        return STOP if grammar.accept(token) else None
    except Exception as error:  # noqa: BLE001  one request's grammar must not cost the others
        return error


class LoopMetrics:
    """Counters and histograms of one loop; `exported` lists all of them. The generating thread writes them."""

    def __init__(self) -> None:
        self.iteration_ms = Histogram("iteration_ms", "Time of one iteration of the loop", _ITERATION_MS)
        self.first_token_ms = Histogram("first_token_ms", "From arrival to the first token", _FIRST_TOKEN_MS)
        self.between_tokens_ms = Histogram("between_tokens_ms", "From a request's token to its next", _ITERATION_MS)
        self.prompt_tokens = Counter("prompt_tokens_total", "Tokens of prompts computed")
        self.generated_tokens = Counter("generated_tokens_total", "Tokens generated")
        self.prefix_queries = Counter("prefix_cache_queries_total", "Tokens of requests that got slots")
        self.prefix_hits = Counter("prefix_cache_hits_total", "Those of them whose keys and values were there")
        self.draft_tokens = Counter("spec_decode_num_draft_tokens_total", "Tokens that were proposed and verified")
        self.accepted_tokens = Counter("spec_decode_num_accepted_tokens_total", "Those of them that the model chose")
        self.preemptions = Counter("preemptions_total", "Requests that lost their slots, since blocks ran out")
        self.parts = {
            part: Counter("iteration_part_ms_total", "Time of the generating thread by activity", {"part": part})
            for part in (MODEL, SAMPLING, REST)
        }

    @property
    def exported(self) -> list[Counter | Histogram]:
        return [
            *(self.iteration_ms, self.first_token_ms, self.between_tokens_ms),
            *(self.prompt_tokens, self.generated_tokens, self.preemptions, self.prefix_queries, self.prefix_hits),
            *(self.draft_tokens, self.accepted_tokens),
            *self.parts.values(),
        ]

    def observe_tokens(self, prompt: int, generated: int, drafted: int, accepted: int) -> None:
        """Count the tokens of one iteration: of prompts, new ones, and of those proposed and chosen among them."""
        self.prompt_tokens.add(prompt)
        self.generated_tokens.add(generated)
        self.draft_tokens.add(drafted)
        self.accepted_tokens.add(accepted)

    def observe_iteration(
        self, start: float, model: float, sampling: float, recording: float, end: float, waited: float
    ) -> None:
        """Count one iteration by the instants, in seconds, at which it and its phases began and it ended.

        waited: seconds before the first phase and in the last one in which the model still computed.
        """
        self.parts[MODEL].add((sampling - model + waited) * 1e3)
        self.parts[SAMPLING].add((recording - sampling) * 1e3)
        self.parts[REST].add((model - start + end - recording - waited) * 1e3)
        self.iteration_ms.observe((end - start) * 1e3)
