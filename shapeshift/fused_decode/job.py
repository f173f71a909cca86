"""What a client asked for: one or several answers, and the responses that carry them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.engine.detokenize import text_of
from shapeshift.fused_decode.engine.sampling.sampler import TokenLogprobs
from shapeshift.fused_decode.request import STOP, Ids, Request
from shapeshift.fused_decode.request_parser import TEXT, ParsedRequest
from shapeshift.fused_decode.sampling_params import SamplingParams
from shapeshift.serving import error_codes
from shapeshift.serving.front import Client, Front
from shapeshift.serving.parameters import RequestParameters
from shapeshift.serving.pb_utils import InferenceResponse, ResponseSender

Arrays = dict[str, npt.NDArray[Any]]

# What JSON cannot say of a token without any probability; vLLM and OpenAI say the same.
_LEAST_LOGPROB = -9999.0


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


@dataclass(frozen=True)
class Piece:
    """What one response says of one choice: new text and tokens of the answer to `request`.

    finish_reason  None: the choice goes on
    score          of beam search, see `beam_search.Hypothesis`
    """

    request: Request
    choice: int
    text: bytes
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    score: float = math.nan


class AnswerOutputs:
    """Makes the outputs that a request asks for.

    names        of the outputs that the request's inputs name, and that its client takes
    token_bytes  the bytes of each token
    """

    def __init__(self, names: Collection[str], token_bytes: Sequence[bytes]) -> None:
        self._names = frozenset(names)
        self.token_bytes = token_bytes

    def arrays(self, pieces: Sequence[Piece], prompts: Sequence[Request] = ()) -> Arrays:
        """The outputs of a response: a row for each piece, tokens piece after piece.

        prompts: a request of each prompt, in the first response.
        """
        arrays = self._rows(pieces) | self._tokens(pieces) | self._prompts(prompts)
        if any(piece.finish_reason for piece in pieces):
            arrays |= self._ends(pieces)
        return {name: values for name, values in arrays.items() if name in self._names}

    def _rows(self, pieces: Sequence[Piece]) -> Arrays:
        return {
            TEXT: _texts(piece.text for piece in pieces),
            "choice_index": np.array([piece.choice for piece in pieces], np.int32),
            "request_id": _texts(piece.request.id.encode() for piece in pieces[:1]),
            "num_input_tokens": np.array([len(piece.request.prompt) for piece in pieces], np.uint32),
            "num_cached_tokens": np.array([piece.request.shared for piece in pieces], np.uint32),
            "num_output_tokens": np.array([len(piece.token_ids) for piece in pieces], np.uint32),
            "sequence_score": np.array([piece.score for piece in pieces], np.float32),
        }

    def _ends(self, pieces: Sequence[Piece]) -> Arrays:
        ends = [piece.finish_reason is not None for piece in pieces]
        timings = [piece.request.timings_ms() for piece in pieces if piece.finish_reason is not None]
        by_name: Arrays = {}
        for name in timings[0]:
            by_name[name] = np.full(len(pieces), np.nan, np.float32)
            by_name[name][ends] = [one[name] for one in timings]
        stops = [piece.request.stop_reason if piece.finish_reason == STOP else None for piece in pieces]
        if stops.count(None) < len(stops):
            by_name["stop_reason"] = _texts(json.dumps(stop).encode() for stop in stops)
        return {"finish_reason": _texts((piece.finish_reason or "").encode() for piece in pieces), **by_name}

    def _tokens(self, pieces: Sequence[Piece]) -> Arrays:
        arrays: Arrays = {}
        if "token_ids" in self._names:
            arrays["token_ids"] = np.array([token for piece in pieces for token in piece.token_ids], np.int32)
        if "token_logprobs" in self._names:
            tokens = [token for piece in pieces for token in piece.logprobs]
            shape = len(tokens), max((len(token.top) for token in tokens), default=0)
            arrays["token_logprobs"] = np.array([token.logprob for token in tokens], np.float32)
            arrays["top_token_ids"] = np.array([token.top for token in tokens], np.int32).reshape(shape)
            arrays["top_logprobs"] = np.array([token.top_logprobs for token in tokens], np.float32).reshape(shape)
        if "logprobs" in self._names:
            arrays["logprobs"] = _texts(self._json(piece.token_ids, piece.logprobs) for piece in pieces)
        return arrays

    def _prompts(self, prompts: Sequence[Request]) -> Arrays:
        if not prompts:
            return {}
        arrays: Arrays = {"prompt_token_ids": np.concatenate([one.prompt for one in prompts]).astype(np.int32)}
        if "prompt_logprobs" in self._names:
            arrays["prompt_logprobs"] = _texts(
                self._json(one.prompt.tolist()[1:], one.prompt_logprobs, first=(None,)) for one in prompts
            )
        return arrays

    def _json(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], first: Iterable[None] = ()) -> bytes:
        """In the form of vLLM's backend: for each token an object by ids, of the token and of the most likely ones."""
        if not logprobs and tokens:
            return b"null"
        listed: list[Any] = list(first)
        for token, scored in zip(tokens, logprobs, strict=False):
            entries = {str(token): self._entry(token, scored.logprob, scored.rank)}
            likeliest = zip(scored.top.tolist(), scored.top_logprobs.tolist(), strict=True)
            for rank, (top, logprob) in enumerate(likeliest, 1):
                entries.setdefault(str(top), self._entry(top, logprob, rank))
            listed.append(entries)
        return json.dumps(listed).encode()

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        content = self.token_bytes[token] if token < len(self.token_bytes) else b""
        text = content.decode(errors="replace")
        return {"logprob": max(logprob, _LEAST_LOGPROB), "rank": rank, "decoded_token": text, "bytes": list(content)}


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
        self._wants_code, self._line, self._trace, self._code = client[1:]
        self._outputs = outputs
        self._echo = [prompt.text for prompt in prompts] if parsed.echo else []
        self._sent: dict[Request, tuple[int, int]] = {}
        self._has_begun = False
        self._failure: Exception | None = None

    @property
    def client(self) -> Client:
        assert self.response_sender is not None, "it has its last response"
        return Client(self.response_sender, self._wants_code, self._line, self._trace, self._code)

    @property
    def arrived(self) -> float:
        return self.requests[0].arrived

    @property
    def error(self) -> Exception | None:
        """Why the requests failed, once they have ended, or why a response could not be made."""
        return self._failure or self.requests[0].error

    def prompt_of(self, request: Request) -> Prompt:
        """The prompt of one of the requests."""
        return self.prompts[self.requests.index(request) // self.params.samples]

    def next_response(self) -> tuple[InferenceResponse, bool] | None:
        (request,) = self.requests
        # Read first: once it is true, nothing more is added.
        last = request.is_finished
        if last:
            self._front.watch.remove(self)
            if request.error is not None:
                return self._failed(request.error), True
        piece = self._piece(0, request, last)
        return None if piece is None else (self._response([piece], [request]), last)

    def sent(self, last: bool) -> None:
        if last:
            code = self._code if self.error is None else error_codes.code_name(self.error)
            self._front.responder.count(code, self.arrived)
            self._front.ended(self, self._line, self._trace, code)

    def broken(self) -> None:
        self._front.cancel(self)

    def _piece(self, choice: int, request: Request, is_finished: bool) -> Piece | None:
        """What is new of a choice; None where there is nothing."""
        sent_parts, sent_tokens = self._sent.get(request, (0, 0))
        parts = request.parts[sent_parts:]
        if not (parts or is_finished):
            return None
        # Tokens and logprobs are there before they are counted.
        end = request.generated
        self._sent[request] = sent_parts + len(parts), end
        new = slice(sent_tokens, end)
        reason = request.finish_reason if is_finished else None
        text = self._begun(choice) + "".join(parts).encode()
        return Piece(request, choice, text, request.token_ids[new], request.logprobs[new], reason)

    def _begun(self, choice: int) -> bytes:
        """What the text of a choice begins with."""
        return self._echo[choice // self.params.choices] if self._echo else b""

    def _response(self, pieces: Sequence[Piece], prompts: Sequence[Request]) -> InferenceResponse:
        """A response with these pieces; the first one also describes the prompts, with an answer to each."""
        try:
            self.values = self._outputs.arrays(pieces, () if self._has_begun else prompts)
            self._has_begun = True
            return self._front.respond(self)
        except Exception as error:
            # What is raised is the last response.
            self._failure = error
            self._front.watch.remove(self)
            self._front.cancel(self)
            raise

    def _failed(self, error: Exception) -> InferenceResponse:
        return self._front.responder.error_response(error, self._wants_code)


class ChoicesJob(GenerateJob):
    """A job with several answers: of `samples` for each prompt, the `n` most likely ones are the choices.

    A sample that fails ends all of them. In a stream a response has a row for each choice with new text, or that has
    ended. The first one waits for the logprobs of every prompt: samples beside the one that scores it may be ahead.
    """

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
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
        pieces = []
        for choice, request in enumerate(self._chosen(last)):
            if request not in self._has_ended and (piece := self._piece(choice, request, request in finished)):
                pieces.append(piece)
        self._has_ended |= {piece.request for piece in pieces if piece.finish_reason is not None}
        return pieces

    def _chosen(self, last: bool) -> list[Request]:
        """The samples that are choices, in their order; the likeliest ones are known when all have ended."""
        samples, n = self.params.samples, self.params.n
        if samples == n:
            return list(self.requests)
        assert last, "the most likely answers are not known before all have ended"
        prompts = (self.requests[first : first + samples] for first in range(0, len(self.requests), samples))
        return [request for prompt in prompts for request in sorted(prompt, key=_mean_logprob, reverse=True)[:n]]


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
                reason = STOP if one.is_complete else request.finish_reason
                content = self._begun(len(pieces)) + text.encode()
                pieces.append(Piece(request, len(pieces), content, tokens, [], reason, one.score))
        return pieces


def _mean_logprob(request: Request) -> float:
    scores = [token.logprob for token in request.logprobs]
    return sum(scores) / len(scores) if scores else -math.inf


def _texts(values: Iterable[bytes]) -> npt.NDArray[np.object_]:
    return np.array(list(values), dtype=object)
