"""The outputs of a response, from what the generating thread has written of its choices."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shapeshift.fused_decode.engine.sampling.logprobs import TokenLogprobs

Arrays = dict[str, npt.NDArray[Any]]

TEXT = "text_output"
# What JSON cannot say of a token without any probability; vLLM and OpenAI say the same.
_LEAST_LOGPROB = -9999.0


class Answer(Protocol):
    """What is read of a request, see `request.Request`."""

    id: str
    prompt: npt.NDArray[np.int64]
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish_reason: str | None

    def timings_ms(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Piece:
    """What one response says of one choice: `text`, and the tokens `first` to `end` - 1 of its answer.

    ends: whether it is the last one of this choice; score: of beam search, see `beam_search.Hypothesis`.
    """

    answer: Answer
    choice: int
    text: bytes
    first: int
    end: int
    ends: bool
    score: float = math.nan


class AnswerOutputs:
    """Makes the outputs that a request asks for.

    wanted       names of the outputs that the request's inputs name, and that its client takes
    token_bytes  the bytes of each token
    """

    def __init__(self, wanted: Collection[str], token_bytes: Sequence[bytes]) -> None:
        self._wanted = frozenset(wanted)
        self.token_bytes = token_bytes

    def arrays(self, pieces: Sequence[Piece], prompts: Sequence[Answer] = ()) -> Arrays:
        """The outputs of a response: a row for each piece, tokens piece after piece.

        prompts: an answer to each prompt, in the first response.
        """
        made = self._rows(pieces) | self._tokens(pieces) | self._prompts(prompts)
        if any(piece.ends for piece in pieces):
            made |= self._ends(pieces)
        return {name: values for name, values in made.items() if name in self._wanted}

    def _rows(self, pieces: Sequence[Piece]) -> Arrays:
        return {
            TEXT: _texts(piece.text for piece in pieces),
            "choice_index": np.array([piece.choice for piece in pieces], np.int32),
            "request_id": _texts(piece.answer.id.encode() for piece in pieces[:1]),
            "num_input_tokens": np.array([len(piece.answer.prompt) for piece in pieces], np.uint32),
            "num_output_tokens": np.array([piece.end - piece.first for piece in pieces], np.uint32),
            "sequence_score": np.array([piece.score for piece in pieces], np.float32),
        }

    def _ends(self, pieces: Sequence[Piece]) -> Arrays:
        timings = [piece.answer.timings_ms() for piece in pieces if piece.ends]
        by_name: Arrays = {}
        for name in timings[0]:
            by_name[name] = np.full(len(pieces), np.nan, np.float32)
            by_name[name][[piece.ends for piece in pieces]] = [own[name] for own in timings]
        reasons = (str(piece.answer.finish_reason).encode() if piece.ends else b"" for piece in pieces)
        return {"finish_reason": _texts(reasons), **by_name}

    def _tokens(self, pieces: Sequence[Piece]) -> Arrays:
        made: Arrays = {}
        if "token_ids" in self._wanted:
            made["token_ids"] = np.array([token for one in pieces for token in _tokens(one)], np.int32)
        if "token_logprobs" in self._wanted:
            found = [own for one in pieces for own in one.answer.logprobs[one.first : one.end]]
            width = max((len(own.top) for own in found), default=0)
            made["token_logprobs"] = np.array([own.logprob for own in found], np.float32)
            made["top_token_ids"] = np.array([own.top for own in found], np.int32).reshape(len(found), width)
            made["top_logprobs"] = np.array([own.top_logprobs for own in found], np.float32).reshape(len(found), width)
        if "logprobs" in self._wanted:
            made["logprobs"] = _texts(
                self._json(_tokens(one), one.answer.logprobs[one.first : one.end]) for one in pieces
            )
        return made

    def _prompts(self, prompts: Sequence[Answer]) -> Arrays:
        if not prompts:
            return {}
        made: Arrays = {"prompt_token_ids": np.concatenate([one.prompt for one in prompts]).astype(np.int32)}
        if "prompt_logprobs" in self._wanted:
            made["prompt_logprobs"] = _texts(
                self._json(one.prompt.tolist()[1:], one.prompt_logprobs, first=(None,)) for one in prompts
            )
        return made

    def _json(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], first: Iterable[None] = ()) -> bytes:
        """In the form of vLLM's backend: for each token an object by ids, of the token and of the most likely ones."""
        if not logprobs and tokens:
            return b"null"
        listed: list[Any] = list(first)
        for token, own in zip(tokens, logprobs, strict=False):
            entries = {str(token): self._entry(token, own.logprob, own.rank)}
            for rank, (top, logprob) in enumerate(zip(own.top.tolist(), own.top_logprobs.tolist(), strict=True), 1):
                entries.setdefault(str(top), self._entry(top, logprob, rank))
            listed.append(entries)
        return json.dumps(listed).encode()

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        own = self.token_bytes[token] if token < len(self.token_bytes) else b""
        text = own.decode(errors="replace")
        return {"logprob": max(logprob, _LEAST_LOGPROB), "rank": rank, "decoded_token": text, "bytes": list(own)}


def _tokens(piece: Piece) -> list[int]:
    return piece.answer.token_ids[piece.first : piece.end]


def _texts(values: Iterable[bytes]) -> npt.NDArray[np.object_]:
    return np.array(list(values), dtype=object)
