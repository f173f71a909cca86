"""The tokens of texts, and the text of tokens, which the front of a model knows: nothing is computed for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import orjson

from shapeshift.errors import EngineError
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import Context
from shapeshift.gateway.text_rows import require_output, text_column
from shapeshift.serving.description import GENERATION
from shapeshift.serving.model_args import TOKENS
from shapeshift.triton.async_client import ModelCall, first_of

# Texts of one call, for a front that states no limit: as many prompts as a generator takes.
_AT_ONCE = 64


@dataclass(frozen=True)
class Tokens:
    """Of one text.

    text     the whole one, with the prompt that the model puts before it
    names    of its tokens in the vocabulary
    offsets  of each token, [start, end) in characters; none where the tokens were given
    special  1 for those that stand around the text; none likewise
    """

    text: str
    ids: Sequence[int]
    names: Sequence[str]
    offsets: Sequence[tuple[int, int]] = ()
    special: Sequence[int] = ()

    def without_special(self) -> Tokens:
        """Those of the text alone."""
        places = [place for place, special in enumerate(self.special) if not special]
        ids, names = [self.ids[place] for place in places], [self.names[place] for place in places]
        return Tokens(self.text, ids, names, [self.offsets[place] for place in places], [0] * len(places))


async def tokens_of(
    context: Context,
    target: Target,
    inputs: Sequence[str] | Sequence[Sequence[int]],
    parameters: Mapping[str, Any] | None = None,
) -> list[Tokens]:
    """The tokens of each text, or the text of the tokens of each, in which case the model is one that generates.

    Raises ApiError for an empty text, and a model that does not tell; else as `Upstream.stream`.
    """
    front = target.front
    require_output(target, TOKENS.name)
    answers: list[Tokens] = []
    size = front.number("max_batch_size", 0) or _AT_ONCE
    texts = None if inputs and not isinstance(inputs[0], str) else text_column(cast("Sequence[str]", inputs))
    for first in range(0, len(inputs), size):
        tensors: dict[str, Any]
        if texts is None:
            part = inputs[first : first + size]
            lengths = np.array([len(ids) for ids in part], np.int32)
            tensors = {"input_ids": np.concatenate([np.array(ids, np.int32) for ids in part]), "input_lengths": lengths}
        else:
            column = texts[first : first + size]
            tensors = {"text_input": column[:, 0]} if front.serves_as((GENERATION,)) else {"TEXT": column}
        call = ModelCall(front.stream, tensors, context.timeout_s, (TOKENS.name,), parameters or {}, context.request_id)
        answer = await first_of(context.gateway.upstream.stream(call))
        if answer is None:
            raise EngineError(f"model {front.stream} ended its responses without one")
        answers += [_read(row) for row in answer[TOKENS.name].reshape(-1).tolist()]
    return answers


def _read(row: bytes) -> Tokens:
    said = orjson.loads(row)
    return Tokens(said["text"], said["ids"], said["tokens"], said.get("offsets", ()), said.get("special", ()))
