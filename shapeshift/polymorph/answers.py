"""What a front makes of the outputs of engines: sparse vectors, and entities as transformers' pipeline finds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shapeshift.engines.interfaces import Array, Ids
from shapeshift.engines.text.tokenizer import TextTokenizer
from shapeshift.polymorph.settings import SPARSE_INDICES, SPARSE_VALUES
from shapeshift.serving.text_inputs import Offsets

STRATEGIES = NONE, SIMPLE, FIRST, AVERAGE, MAX = "none", "simple", "first", "average", "max"
"""Values of the parameter aggregation_strategy, transformers' own."""
_OUTSIDE = "O"


def sparse(outputs: Mapping[str, Array], ids: Sequence[Ids], type_stride: int) -> dict[str, Array]:
    """SPARSE_INDICES, INT32 [rows, most], ascending and then -1, and SPARSE_VALUES, above zero and then 0.

    Of TERM_WEIGHTS, or of TOKEN_WEIGHTS: of a token that a row has several times the largest.
    """
    rows = [
        _of_terms(outputs["TERM_WEIGHTS"][row])
        if "TERM_WEIGHTS" in outputs
        else _of_tokens(outputs["TOKEN_WEIGHTS"][row, : len(of_row)], of_row % type_stride if type_stride else of_row)
        for row, of_row in enumerate(ids)
    ]
    most = max((len(indices) for indices, _ in rows), default=0)
    padded_indices = np.full((len(rows), most), -1, np.int32)
    padded_values = np.zeros((len(rows), most), np.float32)
    for row, (indices, values) in enumerate(rows):
        padded_indices[row, : len(indices)], padded_values[row, : len(indices)] = indices, values
    return {SPARSE_INDICES: padded_indices, SPARSE_VALUES: padded_values}


def _of_terms(weights: Array) -> tuple[Array, Array]:
    indices = np.flatnonzero(weights > 0)
    return indices, weights[indices]


def _of_tokens(weights: Array, ids: Ids) -> tuple[Array, Array]:
    indices, places = np.unique(ids, return_inverse=True)
    values = np.zeros(len(indices), np.float32)
    np.maximum.at(values, places, weights)
    return indices[values > 0], values[values > 0]


class _Token(NamedTuple):
    """A token of a text: its place among all, its name and scores of the labels; start, end: its characters."""

    place: int
    word: str
    scores: NDArray[np.float32]
    start: int
    end: int
    continues: bool


def entities(
    logits: Array, ids: Ids, offsets: Offsets, text: bytes, labels: Sequence[str], words: TextTokenizer, strategy: str
) -> bytes:
    """JSON of the entities of a text: a list of objects, as by transformers' TokenClassificationPipeline.

    logits: [tokens, labels]; offsets: bytes of each token, -1 for special ones. With `none` an object is a token.
    """
    tokens = _tokens(logits, ids, offsets, text, words)
    if strategy in (FIRST, AVERAGE, MAX):
        parts = [_word(group, strategy, labels, words) for group in _grouped(tokens)]
    else:
        parts = [_object([token], token.scores, labels, token.word) for token in tokens]
    if strategy == NONE:
        listed = [{**part, "index": token.place} for part, token in zip(parts, tokens, strict=True)]
        listed = [{name: one[name] for name in ("entity", "score", "index", "word", "start", "end")} for one in listed]
    else:
        listed = _entity_groups(parts, words)
    named = [one for one in listed if one.get("entity", one.get("entity_group")) != _OUTSIDE]
    return json.dumps(named, ensure_ascii=False).encode()


def _tokens(logits: Array, ids: Ids, offsets: Offsets, text: bytes, words: TextTokenizer) -> list[_Token]:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = powers / powers.sum(axis=1, keepdims=True)
    whole = text.decode(errors="ignore")
    names, unknown, marks_continuations = words.names(ids.tolist()), words.unknown, words.marks_continuations
    # The offsets of a text in ASCII are characters already.
    places = None if whole.isascii() else np.cumsum([0, *(len(one.encode()) for one in whole)])
    tokens = []
    for index, (start, end) in enumerate(offsets.tolist()):
        if start < 0:
            continue
        if places is not None:
            start, end = (int(np.searchsorted(places, place)) for place in (start, end))
        piece, name = whole[start:end], names[index]
        if marks_continuations:
            continues = len(name) != len(piece)
        else:
            continues = start > 0 and " " not in whole[start - 1 : start + 1]
        if ids[index] == unknown:
            name, continues = piece, False
        tokens.append(_Token(index, name, scores[index], start, end, continues))
    return tokens


def _grouped(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """The tokens of each word."""
    groups: list[list[_Token]] = []
    for token in tokens:
        if groups and token.continues:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def _word(group: Sequence[_Token], strategy: str, labels: Sequence[str], words: TextTokenizer) -> dict[str, Any]:
    if strategy == FIRST:
        scores = group[0].scores
    elif strategy == MAX:
        scores = max(group, key=lambda token: float(token.scores.max())).scores
    else:
        scores = np.mean([token.scores for token in group], axis=0)
    return _object(group, scores, labels, words.joined([token.word for token in group]))


def _object(group: Sequence[_Token], scores: NDArray[np.float32], labels: Sequence[str], word: str) -> dict[str, Any]:
    best = int(scores.argmax())
    place = {"start": group[0].start, "end": group[-1].end}
    return {"entity": labels[best], "score": float(scores[best]), "word": word, **place}


def _entity_groups(parts: Sequence[dict[str, Any]], words: TextTokenizer) -> list[dict[str, Any]]:
    """Neighbours of the same label are one entity, unless the later one begins another (B-)."""
    groups: list[list[dict[str, Any]]] = []
    for part in parts:
        if groups and not part["entity"].startswith("B-") and _tag(part) == _tag(groups[-1][-1]):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [
        {
            "entity_group": group[0]["entity"].split("-", 1)[-1],
            "score": float(np.mean([part["score"] for part in group])),
            "word": words.joined([part["word"] for part in group]),
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]


def _tag(part: Mapping[str, Any]) -> str:
    name = str(part["entity"])
    return name[2:] if name.startswith(("B-", "I-")) else name
