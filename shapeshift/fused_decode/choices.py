"""Requests with several answers: the samples that they are made of, and the responses that carry them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shapeshift.fused_decode.answers import Piece
from shapeshift.fused_decode.request import GenerationResponse, Reason, Request
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.serving.pb_utils import InferenceResponse


def sample_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each sample of a prompt: sample i is what a request with the seed `seed` + i would get."""
    # The most likely answers are found by their logprobs.
    logprobs = 0 if params.samples > params.n and params.logprobs is None else params.logprobs
    return [
        replace(
            params,
            n=1,
            best_of=None,
            seed=None if params.seed is None else params.seed + sample,
            logprobs=logprobs,
            prompt_logprobs=None if sample else params.prompt_logprobs,
        )
        for sample in range(params.samples)
    ]


class ChoicesResponse(GenerationResponse):
    """The responses to a request with several answers; `requests` has the samples of each prompt, prompt after prompt.

    params  of the request: of its `samples` for each prompt, the `n` most likely ones are the choices
    end     end(request, reason) ends a sample early; one that fails ends all of them

    In a stream a response has a row for each choice with new text, or that has ended.
    """

    def __init__(
        self, *fields: Any, params: SamplingParams, end: Callable[[Request, Reason], None], **named: Any
    ) -> None:
        super().__init__(*fields, **named)
        self._params = params
        self._end = end
        self._failure: Exception | None = None
        self._sent_parts: dict[Request, int] = {}
        self._sent_tokens: dict[Request, int] = {}
        self._has_ended: set[Request] = set()

    @property
    def error(self) -> Exception | None:
        return self._failure

    def next_response(self) -> tuple[InferenceResponse, bool] | None:
        # Read first: once a sample has finished, nothing more is added to it.
        finished = {request for request in self.requests if request.is_finished}
        last = len(finished) == len(self.requests)
        self._fail_together(finished)
        if self._failure is not None:
            if not last:
                return None
            self._finishing(self)
            return self._error_response(self._pb_utils, self._failure), True
        if not last and not self.requests[0].stream:
            return None
        if last:
            self._finishing(self)
        found = (self._piece(choice, request, request in finished) for choice, request in enumerate(self._chosen(last)))
        pieces = [piece for piece in found if piece is not None]
        if not pieces:
            return None
        return self._made(pieces, self.requests[:: self._params.samples]), last

    def _fail_together(self, finished: set[Request]) -> None:
        if self._failure is None:
            self._failure = next((request.error for request in finished if request.error is not None), None)
            if self._failure is not None:
                for request in self.requests:
                    self._end(request, self._failure)

    def _chosen(self, last: bool) -> list[Request]:
        """The samples that are choices, in their order; the likeliest ones are known when all have ended."""
        samples, n = self._params.samples, self._params.n
        if samples == n:
            return list(self.requests)
        assert last, "the most likely answers are not known before all have ended"
        prompts = (self.requests[first : first + samples] for first in range(0, len(self.requests), samples))
        return [request for own in prompts for request in sorted(own, key=_mean_logprob, reverse=True)[:n]]

    def _piece(self, choice: int, request: Request, is_finished: bool) -> Piece | None:
        """What is new of a choice; None where there is nothing."""
        sent = self._sent_parts.get(request, 0)
        parts = request.parts[sent:]
        if request in self._has_ended or not (parts or is_finished):
            return None
        self._sent_parts[request] = sent + len(parts)
        first, end = self._sent_tokens.get(request, 0), request.generated
        self._sent_tokens[request] = end
        if is_finished:
            self._has_ended.add(request)
        echo = self._echo[choice // self._params.n] if self._echo else b""
        return Piece(request, choice, echo + "".join(parts).encode(), first, end, is_finished)


def _mean_logprob(request: Request) -> float:
    scores = [token.logprob for token in request.logprobs]
    return sum(scores) / len(scores) if scores else -math.inf
