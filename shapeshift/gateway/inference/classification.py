"""Texts and images through classifiers: the probabilities of their labels."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import ModelError
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.errors import ApiError, invalid
from shapeshift.gateway.inference.text_rows import (
    counted,
    infer_rows,
    num_tokens,
    renumbered,
    require_outputs,
    text_column,
)
from shapeshift.gateway.state import Gateway
from shapeshift.serving.description import IDENTITY, IMAGE_CLASSIFICATION, SIGMOID, SOFTMAX
from shapeshift.triton.async_client import Tensors

_DATA_URL = re.compile(r"data:image/(?:png|jpeg|jpg);base64,", re.IGNORECASE)
_MOST_ROWS = 2048
# What stands beside the label where a front has it, in lower case.
_FURTHER = ("CONFIDENCE", "LEVEL", "GAMMA", "OUTCOME")


@dataclass(frozen=True)
class Classified:
    """Rows and their classes.

    scores    [n, classes], the logits where `raw` was asked for
    labels    of the classes
    best      the label of each row
    further   what else the front says of each row
    tokens    that the model read of all rows; 0 for images
    """

    scores: NDArray[np.float32]
    labels: Sequence[str]
    best: Sequence[str]
    further: Mapping[str, Sequence[Any]]
    tokens: int


async def classify(
    gateway: Gateway,
    target: Target,
    rows: Sequence[Sequence[str]],
    parameters: Mapping[str, Any],
    request_id: str,
    raw: bool = False,
) -> Classified:
    """The classes of rows, each of one text, of a pair, or of one image as a data URL.

    Raises ApiError, and as `infer_rows`.

    raw: whether the scores are logits, which a front needs the output LOGITS for.
    """
    if not 1 <= len(rows) <= _MOST_ROWS:
        raise invalid("input", f"{len(rows)} inputs", f"1 to {_MOST_ROWS}")
    front = target.front
    outputs = _outputs(target, raw)
    _check_rows(target, rows)
    found = await _infer(gateway, target, rows, counted(target, *outputs), parameters, request_id)
    scores = found["LOGITS"] if "LOGITS" in outputs else found["PROBABILITIES"]
    if "LOGITS" in outputs and not raw:
        scores = activated(target, scores).astype(np.float32)
    # A model of several tasks states no labels: only the best one is known, by its own output.
    labels = front.labels if len(front.labels) == scores.shape[1] else [f"LABEL_{i}" for i in range(scores.shape[1])]
    if "LABEL" in outputs:
        best = [bytes(label).decode() for label in found["LABEL"].reshape(-1)]
    else:
        best = [labels[int(place)] for place in scores.argmax(axis=1)]
    further = {name.lower(): _plain(found[name]) for name in _FURTHER if name in outputs}
    return Classified(scores, labels, best, further, num_tokens(found))


def _outputs(target: Target, raw: bool) -> list[str]:
    known = target.front.outputs
    if raw or "PROBABILITIES" not in known:
        require_outputs(target, "LOGITS")
        return ["LOGITS"]
    return [name for name in ("PROBABILITIES", "LABEL", *_FURTHER) if name in known]


def activated(target: Target, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The scores of logits [n, classes], by the function that the front states. Raises ApiError if it states none."""
    stated = str(target.front.description.get("activation"))
    if stated not in _ACTIVATIONS:
        text = f"model: {target.name} has activation {stated}, not one of {', '.join(_ACTIVATIONS)}: build its engines"
        raise ApiError(400, text, param="model", code="model_not_supported")
    return _ACTIVATIONS[stated](logits.astype(np.float64))


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


_ACTIVATIONS: Mapping[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    IDENTITY: lambda logits: logits,
    SIGMOID: lambda logits: 1.0 / (1.0 + np.exp(-logits)),
    SOFTMAX: _softmax,
}


async def _infer(
    gateway: Gateway,
    target: Target,
    rows: Sequence[Sequence[str]],
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
    request_id: str,
) -> Tensors:
    """As `infer_rows`. A call has rows of one text, or pairs."""
    groups = [[place for place, row in enumerate(rows) if len(row) == size] for size in (1, 2)]
    parts = []
    for group in filter(None, groups):
        columns = _columns(target, [rows[place] for place in group])
        try:
            parts.append(await infer_rows(gateway, target, columns, outputs, parameters, request_id))
        except ModelError as error:
            raise renumbered(error, group.__getitem__) from None
    order = np.argsort(np.concatenate(groups))
    return {name: np.concatenate([part[name] for part in parts])[order] for name in outputs}


def _check_rows(target: Target, rows: Sequence[Sequence[str]]) -> None:
    stated = target.front.description
    sizes = [size for size, served in ((1, not stated.get("only_pairs")), (2, stated.get("pairs"))) if served]
    wrong = next((place for place, row in enumerate(rows) if len(row) not in sizes), None)
    if wrong is not None:
        allowed = f"{' or '.join(map(str, sizes))}, which {target.name} classifies"
        raise invalid(f"input[{wrong}]", f"{len(rows[wrong])} texts", allowed)
    empty = next((place for place, row in enumerate(rows) if not all(row)), None)
    if empty is not None:
        raise invalid(f"input[{empty}]", "", "a text that is not empty")


def _columns(target: Target, rows: Sequence[Sequence[str]]) -> dict[str, NDArray[Any]]:
    """The inputs for rows that all have as many texts."""
    if target.front.kind == IMAGE_CLASSIFICATION:
        column = np.empty((len(rows), 1), dtype=object)
        column[:, 0] = [_image(row[0], place) for place, row in enumerate(rows)]
        return {"IMAGE": column}
    columns = {"TEXT": text_column([row[0] for row in rows])}
    if len(rows[0]) == 2:
        columns["TEXT_PAIR"] = text_column([row[1] for row in rows])
    return columns


def _image(url: str, place: int) -> bytes:
    """The file in a data URL; its pixels are decoded, within their limit, by the model."""
    head = _DATA_URL.match(url)
    if head is None:
        raise invalid(f"input[{place}]", url, "a data URL of a PNG or JPEG file: data:image/png;base64,...")
    try:
        found = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"input[{place}]", url, "valid base64 after the comma") from None
    if not found:
        raise ApiError(400, f"input[{place}]: an image of 0 bytes", param=f"input[{place}]", code="invalid_value")
    return found


def _plain(values: NDArray[Any]) -> list[Any]:
    return [one.decode() if isinstance(one, bytes) else one for one in values.reshape(-1).tolist()]
