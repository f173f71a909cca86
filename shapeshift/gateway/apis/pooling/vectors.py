"""What a client may have made of vectors: fewer numbers, whole numbers, bits; and how alike two texts are by them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.errors import ApiError, invalid

VectorType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
Floats = NDArray[Any]
# Numbers of a vector of length 1 lie within so many times their root mean square. Of MiniLM's none lay beyond 4.9.
_WIDEST = 6.0


def shortened(target: Target, vectors: Floats, dimensions: int | None, field: str = "dimensions") -> Floats:
    """The first `dimensions` numbers of each vector, of length 1, where the model was trained for that.

    Raises ApiError for a number that it does not allow.
    """
    width = vectors.shape[1]
    if dimensions is None or dimensions == width:
        return vectors
    allowed = target.front.description.get("dimensions") or []
    if allowed == "any":
        if dimensions > width:
            raise invalid(field, dimensions, f"1 to {width}, the numbers of {target.name}")
    elif dimensions not in allowed:
        widths = ", ".join(map(str, sorted({*map(int, allowed), width})))
        raise invalid(field, dimensions, f"one of {widths}, which {target.name} was trained for")
    return of_length_1(vectors[:, :dimensions])


def of_length_1(vectors: Floats) -> Floats:
    """The vectors [n, width] divided by their lengths."""
    scaled: Floats = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return scaled


def of_type(vectors: Floats, kind: str, field: str) -> NDArray[Any] | list[str]:
    """The vectors [n, width] as sentence-transformers' `quantize_embeddings` makes them, or in base64.

    int8 and uint8 have 255 steps of equal size, whatever the model, so that vectors of all requests can be compared.
    Raises ApiError for bits of a width that is no multiple of 8.
    """
    if kind.endswith("binary") and vectors.shape[1] % 8:
        raise invalid(field, kind, f"of vectors whose width is a multiple of 8; this one is {vectors.shape[1]}")
    return _TYPES[kind](vectors)


def in_base64(rows: Iterable[NDArray[Any]]) -> list[str]:
    """Each row: little-endian."""
    return [base64.b64encode(row.astype(row.dtype.newbyteorder("<")).tobytes()).decode("ascii") for row in rows]


def _steps(vectors: Floats) -> NDArray[np.float32]:
    most = _WIDEST / vectors.shape[1] ** 0.5
    return np.asarray(np.clip(np.floor((of_length_1(vectors) + most) / (2 * most / 255)), 0, 255), np.float32)


_TYPES: Mapping[str, Callable[[Floats], NDArray[Any] | list[str]]] = {
    "float": lambda vectors: vectors,
    "base64": lambda vectors: in_base64(vectors.astype(np.float32)),
    "int8": lambda vectors: (_steps(vectors) - 128).astype(np.int8),
    "uint8": lambda vectors: _steps(vectors).astype(np.uint8),
    "binary": lambda vectors: (np.packbits(vectors > 0, axis=-1) ^ np.uint8(128)).view(np.int8),
    "ubinary": lambda vectors: np.packbits(vectors > 0, axis=-1),
}


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def token_vectors(padded: Floats) -> list[Floats]:
    """The vectors of each row [tokens, width]; a token without one has zeros, as has what is beyond the row's end."""
    return [row[row.any(axis=1)] for row in padded]


def terms(indices: NDArray[np.int32], values: Floats) -> list[dict[int, float]]:
    """The weights of each row by the id of the vocabulary."""
    return [
        {int(index): float(value) for index, value in zip(*row, strict=True) if value > 0}
        for row in zip(indices, values, strict=True)
    ]


def cosines(one: Floats, others: Sequence[Floats]) -> NDArray[np.float64]:
    """Of a vector [width] and each of the others."""
    both = of_length_1(np.concatenate([one[None], np.asarray(others)]).astype(np.float64))
    return np.asarray(both[1:] @ both[0])


def max_sim(query: Floats, documents: Sequence[Floats]) -> NDArray[np.float64]:
    """For each vector of the query the best product with one of the document, added up (ColBERT)."""
    return np.array([(query @ one.T).max(axis=1).sum() if len(one) else 0.0 for one in documents], np.float64)


def shared_terms(query: Mapping[int, float], documents: Sequence[Mapping[int, float]]) -> NDArray[np.float64]:
    """The products of the weights of the terms that both have, added up."""
    sums = [sum(weight * document.get(term, 0.0) for term, weight in query.items()) for document in documents]
    return np.array(sums, np.float64)


def require_type(target: Target, kind: str, field: str, by_kind: Mapping[str, Sequence[str]]) -> None:
    """Raise ApiError unless the front has the outputs of `by_kind` for what the field asks for."""
    offered = {*target.front.names("outputs")}
    able = [name for name, outputs in by_kind.items() if {*outputs} <= offered]
    if kind not in able:
        text = f"{field}: got {kind!r}; {target.name} has {', '.join(able) or 'none of these'}"
        raise ApiError(400, text, param=field, code="model_not_supported")
