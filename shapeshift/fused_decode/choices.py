"""Requests with several answers: the samples that they are made of, and the responses that carry them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shapeshift.fused_decode.answers import Piece
from shapeshift.fused_decode.engine.detokenize import text_of
from shapeshift.fused_decode.engine.sampling.logprobs import TokenLogprobs
from shapeshift.fused_decode.request import STOP, GenerationResponse, Reason, Request
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

    In a stream a response has a row for each choice with new text, or that has ended. The first one waits for the
    logprobs of every prompt: samples beside the one that scores it may be ahead.
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
        prompts = self.requests[:: self._params.samples]
        if not last and not (self.requests[0].stream and all(one.is_scored or one in finished for one in prompts)):
            return None
        if last:
            self._finishing(self)
        pieces = self._pieces(finished, last)
        if not pieces:
            return None
        return self._made(pieces, prompts), last

    def _fail_together(self, finished: set[Request]) -> None:
        if self._failure is None:
            self._failure = next((request.error for request in finished if request.error is not None), None)
            if self._failure is not None:
                for request in self.requests:
                    self._end(request, self._failure)

    def _pieces(self, finished: Collection[Request], last: bool) -> list[Piece]:
        """What is new of each choice."""
        found = (self._piece(choice, request, request in finished) for choice, request in enumerate(self._chosen(last)))
        return [piece for piece in found if piece is not None]

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
        return Piece(request, choice, self._begun(choice) + "".join(parts).encode(), first, end, is_finished)

    def _begun(self, choice: int) -> bytes:
        """What the text of a choice begins with."""
        return self._echo[choice // self._params.choices] if self._echo else b""


@dataclass
class _Found:
    """A text that a beam search has found, as an `answers.Answer`."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None

    def __post_init__(self) -> None:
        self.id, self.prompt = self.request.id, self.request.prompt
        self.prompt_logprobs = self.request.prompt_logprobs
        self.logprobs: list[TokenLogprobs] = []

    def timings_ms(self) -> dict[str, float]:
        return self.request.timings_ms()


class BeamsResponse(ChoicesResponse):
    """The one response to a request with beam search; `requests` has one for each prompt.

    token_bytes: the bytes of each token
    """

    def __init__(self, *fields: Any, token_bytes: Sequence[bytes], **named: Any) -> None:
        super().__init__(*fields, **named)
        self._token_bytes = token_bytes

    def _pieces(self, finished: Collection[Request], last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for request in self.requests:
            assert request.beams is not None and request in finished
            for one in request.beams.best:
                tokens = one.tokens.tolist()
                # As without beam search, the token that ends a text is among its tokens and adds no text.
                text = text_of(self._token_bytes, tokens[: len(tokens) - one.is_complete])
                answer = _Found(request, tokens, STOP if one.is_complete else request.finish_reason)
                begun = self._begun(len(pieces))
                pieces.append(Piece(answer, len(pieces), begun + text.encode(), 0, len(tokens), True, one.score))
        return pieces


def _mean_logprob(request: Request) -> float:
    scores = [token.logprob for token in request.logprobs]
    return sum(scores) / len(scores) if scores else -math.inf
