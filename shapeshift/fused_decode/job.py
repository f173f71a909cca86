"""What a client asked for: one or several answers, and the responses that carry them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shapeshift.fused_decode.answers import AnswerOutputs, Arrays, Piece
from shapeshift.fused_decode.engine.detokenize import text_of
from shapeshift.fused_decode.engine.sampling.logprobs import TokenLogprobs
from shapeshift.fused_decode.request import STOP, Ids, Request
from shapeshift.fused_decode.request_parser import ParsedRequest
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.serving.front import Client, Front
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceResponse, ResponseSender


class Prompt(NamedTuple):
    """A prompt: UTF-8, and INT64 [tokens]."""

    text: bytes
    ids: Ids


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


class GenerateJob:
    """A job with one answer; a `serving.responses.ResponseStream`, which reads what the generating thread writes.

    requests  the samples of each prompt, prompt after prompt; here one
    outputs   makes the outputs that the client asks for
    values    of the response that is made
    """

    def __init__(
        self,
        front: Front[Any],
        client: Client,
        parsed: ParsedRequest,
        parameters: RequestParameters,
        prompts: Sequence[Prompt],
        outputs: AnswerOutputs,
    ) -> None:
        self.response_sender: ResponseSender | None = client.sender
        self.prompts = prompts
        self.params = parsed.sampling_params
        self.parameters = parameters
        self.requests: Sequence[Request] = ()
        self.values: Arrays = {}
        self._front = front
        self._wants_code = client.wants_code
        self._outputs = outputs
        self._echo = [prompt.text for prompt in prompts] if parsed.echo else []
        self._parts = self._tokens = 0
        self._has_begun = False

    @property
    def client(self) -> Client:
        assert self.response_sender is not None, "it has its last response"
        return Client(self.response_sender, self._wants_code)

    @property
    def arrived(self) -> float:
        return self.requests[0].arrived

    @property
    def error(self) -> Exception | None:
        """Why the requests failed, once they have ended."""
        return self.requests[0].error

    def prompt_of(self, request: Request) -> Prompt:
        """The prompt of one of the requests."""
        return self.prompts[self.requests.index(request) // self.params.samples]

    def next_response(self) -> tuple[InferenceResponse, bool] | None:
        (request,) = self.requests
        # Read first: once it is true, nothing more is added.
        last = request.is_finished
        parts = request.parts[self._parts :]
        if not last and not parts:
            return None
        if last:
            self._front.watch.remove(self)
        if request.error is not None and last:
            return self._failed(request.error), True
        self._parts += len(parts)
        first, self._tokens = self._tokens, request.generated
        piece = Piece(request, 0, self._begun(0) + "".join(parts).encode(), first, self._tokens, last)
        return self._response([piece], [request]), last

    def sent(self, last: bool) -> None:
        if last:
            self._front.answered(self)

    def broken(self) -> None:
        self._front.cancel(self)

    def _begun(self, choice: int) -> bytes:
        """What the text of a choice begins with."""
        return self._echo[choice // self.params.choices] if self._echo else b""

    def _response(self, pieces: Sequence[Piece], prompts: Sequence[Request]) -> InferenceResponse:
        """A response with these pieces; the first one also describes the prompts, with an answer to each."""
        self.values = self._outputs.arrays(pieces, () if self._has_begun else prompts)
        self._has_begun = True
        return self._front.respond(self)

    def _failed(self, error: Exception) -> InferenceResponse:
        return self._front.responder.error_response(error, self._wants_code)


class ChoicesJob(GenerateJob):
    """A job with several answers: of `samples` for each prompt, the `n` most likely ones are the choices.

    A sample that fails ends all of them. In a stream a response has a row for each choice with new text, or that has
    ended. The first one waits for the logprobs of every prompt: samples beside the one that scores it may be ahead.
    """

    _failure: Exception | None = None

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
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
            self._front.watch.remove(self)
            return self._failed(self._failure), True
        prompts = self.requests[:: self.params.samples]
        if not last and not (self.requests[0].stream and all(one.is_scored or one in finished for one in prompts)):
            return None
        if last:
            self._front.watch.remove(self)
        pieces = self._pieces(finished, last)
        if not pieces:
            return None
        return self._response(pieces, prompts), last

    def _fail_together(self, finished: set[Request]) -> None:
        if self._failure is None:
            self._failure = next((request.error for request in finished if request.error is not None), None)
            if self._failure is not None:
                self._front.cancel(self)

    def _pieces(self, finished: Collection[Request], last: bool) -> list[Piece]:
        """What is new of each choice."""
        found = (self._piece(choice, request, request in finished) for choice, request in enumerate(self._chosen(last)))
        return [piece for piece in found if piece is not None]

    def _chosen(self, last: bool) -> list[Request]:
        """The samples that are choices, in their order; the likeliest ones are known when all have ended."""
        samples, n = self.params.samples, self.params.n
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


class BeamsJob(ChoicesJob):
    """A job with beam search; `requests` has one for each prompt, and there is one response."""

    def _pieces(self, finished: Collection[Request], last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for request in self.requests:
            assert request.beams is not None and request in finished
            for one in request.beams.best:
                tokens = one.tokens.tolist()
                # As without beam search, the token that ends a text is among its tokens and adds no text.
                text = text_of(self._outputs.token_bytes, tokens[: len(tokens) - one.is_complete])
                answer = _Found(request, tokens, STOP if one.is_complete else request.finish_reason)
                begun = self._begun(len(pieces))
                pieces.append(Piece(answer, len(pieces), begun + text.encode(), 0, len(tokens), True, one.score))
        return pieces


def _mean_logprob(request: Request) -> float:
    scores = [token.logprob for token in request.logprobs]
    return sum(scores) / len(scores) if scores else -math.inf
