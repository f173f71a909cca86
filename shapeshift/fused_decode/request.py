"""One answer in the decode loop: its prompt, its parameters, what it has so far, and its early end."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shapeshift.errors import OverloadedError
from shapeshift.fused_decode.engine.detokenize import TextStream
from shapeshift.fused_decode.engine.sampling.logit_edits import TokenRules
from shapeshift.fused_decode.engine.sampling.sampler import TokenLogprobs
from shapeshift.fused_decode.interfaces import BLOCK_TOKENS, blocks_of
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.settings import Choices, require

Ids = npt.NDArray[np.int64]

STOP, LENGTH, ABORT, DEADLINE = "stop", "length", "abort", "deadline"
"""Finish reasons: end of sequence, a stop string or a stop token; a limit; a stop_id; the end of latency_ms."""
SEARCHES: Choices[Any] = Choices("num_beams", {"beams": "shapeshift.fused_decode.engine.beam_search:BeamSearch"})
"""The state of a request with beam search, see `beam_search.BeamSearch`."""
Reason = str | Exception
"""Why a request ends: a finish reason or an error."""
NO_ADAPTER = -1
TOO_LATE = "latency_ms ran out before the first token; retry later or elsewhere"
_FEW_DEADLINES = 64


@dataclass(eq=False, slots=True)
class Request:
    """One request in the decode loop.

    id          what its client may end it by
    prompt      INT64 [tokens]
    text        turns its tokens into text
    job         what its client asked for, see `job.GenerateJob`: this is one answer of it
    rules       the tokens that it biases or bans; None: none
    slo_class   its class in the queue
    grammar     what the answer has to follow, see `grammar.Grammar`; set before the request is submitted; None: nothing
    limit       most tokens of its answer: `max_tokens`, or fewer where the slot ends before
    deadline    when it ends; None: never
    beams       its `beam_search.BeamSearch`, which has the answers instead of `parts` and `token_ids`; None: none
    adapter_id  its value in `StepBatch.adapters`; set before the request gets a slot
    preempted   tokens of its answer from before it was preempted, INT32 [n]
    chunks      where the chunks began and ended in which its prompt was computed, in order
    shared      tokens of its prompt that others had computed
    contents    of its full blocks when it was preempted, see `blocks.BlockPool.contents`: it shares no others again
    hashes      of the first blocks of its text, as far as they were computed, see `blocks.PrefixChains`
    parts       text of the answer, piece by piece
    token_ids   tokens of the answer; logprobs: theirs, where they are asked for
    prompt_logprobs  of the prompt's tokens but the first, where they are asked for
    generated   tokens of the answer so far; joined_with: those of them from before it last got a slot
    is_submitted  whether the loop has it; set by the thread that submits it
    arrived, admitted, first_token, finished  instants on the monotonic clock, in seconds; 0 before they come

    The generating thread writes; others may read. The lists and `generated` only grow, `generated` after the lists of
    tokens, and neither changes once `is_finished` is true: a reader that reads `is_finished`
    first misses nothing.
    """

    id: str
    prompt: Ids
    sampling_params: SamplingParams
    text: TextStream
    _: KW_ONLY
    max_length: InitVar[int]
    latency_ms: InitVar[float | None] = None
    stream: bool = False
    job: Any = None
    rules: TokenRules | None = None
    slo_class: str | None = None
    grammar: Any = None
    limit: int = field(init=False)
    deadline: float | None = field(init=False)
    beams: Any = field(init=False)
    adapter_id: int = NO_ADAPTER
    slot: int | None = None
    preempted: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    chunks: list[int] = field(default_factory=list)
    shared: int = 0
    contents: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    generated: int = 0
    joined_with: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    is_submitted: bool = False
    is_finished: bool = False
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self, max_length: int, latency_ms: float | None) -> None:
        """max_length: most tokens of prompt and answer; latency_ms: from now to the deadline, None: there is none."""
        self.limit = min(self.sampling_params.max_tokens, max_length - len(self.prompt))
        self.deadline = None if latency_ms is None else self.arrived + latency_ms / 1e3
        has_beams = self.sampling_params.num_beams > 1
        self.beams = SEARCHES["beams"](self.sampling_params, self.limit) if has_beams else None

    def finish(self, reason: Reason) -> None:
        """End the answer with a finish reason or an error; its text is complete then."""
        self.slot = None
        if self.grammar is not None:
            self.grammar.end()
        if isinstance(reason, Exception):
            self.error = reason
        else:
            self.finish_reason = reason
            if self.beams is not None:
                self.beams.end()
            if rest := self.text.end():
                self.parts.append(rest)
        self.finished = time.monotonic()
        self.is_finished = True

    @property
    def stop_reason(self) -> str | int | None:
        """Which of `stop` or `stop_token_ids` ended the answer; None where something else did."""
        if self.finish_reason != STOP or self.text.stopped is not None:
            return self.text.stopped
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self.sampling_params.stop_token_ids else None

    @property
    def is_scored(self) -> bool:
        """Whether all of `prompt_logprobs` are there, where they are asked for."""
        scored = self.sampling_params.prompt_logprobs is not None
        return not scored or len(self.prompt_logprobs) == len(self.prompt) - 1

    @property
    def rows(self) -> int:
        """The slots that the request takes: one for each beam."""
        return self.sampling_params.num_beams

    @property
    def slots(self) -> list[int]:
        """The slots that the request holds: one, or one for each beam."""
        if self.slot is None:
            return []
        return [self.slot] if self.beams is None else self.beams.slots

    @property
    def texts(self) -> int:
        """The slots that have a text when the request gets them: beams begin with the first token of the answer."""
        return self.rows if self.generated else 1

    @property
    def tokens(self) -> int:
        """The most tokens that the request can have in its slots: in each its prompt and its longest answer."""
        return self.rows * self.longest

    @property
    def longest(self) -> int:
        """The most tokens of its prompt and an answer."""
        return len(self.prompt) + self.limit

    def require_memory(self, blocks: int, held: int = 0) -> None:
        """Raise InvalidInputError where `blocks`, of which `held` hold something else, have no room for its beams."""
        rows, tokens = self.rows, self.longest
        if rows > 1:
            most = (blocks - held) // blocks_of(tokens)
            holds = f"the texts of {tokens} tokens that kv_cache_tokens ({blocks * BLOCK_TOKENS}) holds"
            beside = f" beside an adapter of {held * BLOCK_TOKENS}" if held else ""
            require(rows <= most, "num_beams", rows, f"at most {most}, {holds}{beside}")

    def whole_chunks(self, blocks: int) -> int:
        """So many of its first `blocks` blocks can it share, if it computes again what it has lost.

        The tokens of a chunk are computed together, as they were before: their last bits depend on it.
        """
        tokens, chunks = blocks * BLOCK_TOKENS, self.chunks
        if not chunks or tokens >= min(chunks[-1], len(self.prompt)):
            return blocks
        return max((end for end in chunks if end <= tokens and end % BLOCK_TOKENS == 0), default=0) // BLOCK_TOKENS

    def timings_ms(self) -> dict[str, float]:
        """The time of a finished request: waiting for a slot, prefill, decode."""
        admitted = self.admitted or self.finished
        first = self.first_token or self.finished
        return {
            "queue_ms": (admitted - self.arrived) * 1e3,
            "prefill_ms": (first - admitted) * 1e3,
            "decode_ms": (self.finished - first) * 1e3,
        }


class Terminations:
    """Requests that end early, on demand or at their deadlines: added by any thread, read by the generating one."""

    def __init__(self) -> None:
        self.demanded: deque[tuple[Request, Reason]] = deque()
        self.submitted: deque[Request] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._most_deadlines = _FEW_DEADLINES
        self._numbers = itertools.count()

    def watch_deadline(self, request: Request) -> None:
        """End `request` at its deadline, if it has one."""
        if request.deadline is not None:
            self.submitted.append(request)

    def add(self, request: Request, reason: Reason) -> None:
        """End `request` at the next iteration; one that is not submitted yet, right after its submission."""
        self.demanded.append((request, reason))

    def due(self, now: float) -> list[tuple[Request, Reason]]:
        """The requests that end now, and why; some more than once. Only the generating thread calls this."""
        ended: list[tuple[Request, Reason]] = []
        for _ in range(len(self.demanded)):
            request, reason = self.demanded.popleft()
            if request.is_submitted:
                ended.append((request, reason))
            elif not request.is_finished:
                self.demanded.append((request, reason))
        while self.submitted:
            request = self.submitted.popleft()
            assert request.deadline is not None
            heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        while self._deadlines and self._deadlines[0][0] <= now:
            late = heapq.heappop(self._deadlines)[2]
            ended.append((late, DEADLINE if late.generated else OverloadedError(TOO_LATE)))
        if len(self._deadlines) > self._most_deadlines:
            self._drop_finished()
        return ended

    def _drop_finished(self) -> None:
        """Forget the deadlines of finished requests, which may be far away."""
        self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
        heapq.heapify(self._deadlines)
        # At least as many are added before the next time, so that a deadline costs constant time.
        self._most_deadlines = 2 * len(self._deadlines) + _FEW_DEADLINES
