"""Requests of many texts to a front with a batch axis: split into what it takes at once, and joined again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import ModelError
from shapeshift.gateway.catalogue import Target
from shapeshift.gateway.endpoint import Context
from shapeshift.gateway.errors import TOO_LONG, ApiError, invalid
from shapeshift.serving.text_inputs import NUM_TOKENS
from shapeshift.triton.async_client import ModelCall, Tensors

# Calls of one request that are in flight at once.
_AT_ONCE = 8
_MOST_INPUTS = 2048
# Tokens of a row for a front that states no limit of its own.
_MOST_TOKENS = 8192
_ROW = re.compile(r"\brow (\d+)\b")

Columns = Mapping[str, NDArray[Any]]


def text_column(texts: Sequence[str], param: str = "input") -> NDArray[Any]:
    """Texts as BYTES [n, 1]. Raises ApiError for an empty one."""
    empty = next((place for place, text in enumerate(texts) if not text), None)
    if empty is not None:
        raise invalid(f"{param}[{empty}]", "", "a text that is not empty")
    column = np.empty((len(texts), 1), dtype=object)
    column[:, 0] = [text.encode() for text in texts]
    return column


class TokenRows:
    """Texts as tokens. Only the rows of one call become tensors at a time, padded to the longest of these.

    most: tokens that a row may have. Raises ApiError for a row with more, or with none.
    """

    def __init__(self, rows: Sequence[Sequence[int]], most: int) -> None:
        for place, row in enumerate(rows):
            if not 1 <= len(row) <= most:
                raise invalid(
                    f"input[{place}]", f"{len(row)} tokens", f"1 to {most}", TOO_LONG if row else "invalid_value"
                )
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self, first: int, last: int) -> Columns:
        """INPUT_IDS and ATTENTION_MASK of the rows from `first` to before `last`, INT64 [rows, longest]."""
        rows = self._rows[first:last]
        lengths = np.array([len(row) for row in rows])
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate([np.array(row, np.int64) for row in rows])
        return {"INPUT_IDS": ids, "ATTENTION_MASK": mask.astype(np.int64)}


async def infer_texts(
    context: Context,
    target: Target,
    inputs: Sequence[str] | Sequence[Sequence[int]],
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
) -> tuple[Tensors, int]:
    """As `infer_rows`, of 1 to 2048 texts, or of their tokens. Raises ApiError naming `input`, too."""
    if not 1 <= len(inputs) <= _MOST_INPUTS:
        raise invalid("input", f"{len(inputs)} inputs", f"1 to {_MOST_INPUTS}")
    rows: Columns | TokenRows
    if isinstance(inputs[0], str):
        rows = {"TEXT": text_column(cast("Sequence[str]", inputs))}
    else:
        rows = TokenRows(cast("Sequence[Sequence[int]]", inputs), target.front.number("max_tokens", _MOST_TOKENS))
    return await infer_rows(context, target, rows, outputs, parameters)


async def infer_rows(
    context: Context, target: Target, rows: Columns | TokenRows, outputs: Sequence[str], parameters: Mapping[str, Any]
) -> tuple[Tensors, int]:
    """The outputs [n, ...] for the rows of all columns, and how many tokens the model read; 0 where it does not tell.

    Raises as `Upstream.infer`; rows are those of the request.
    """
    front = target.front
    size = max(1, front.number("max_batch_size", 64))
    count = len(rows) if isinstance(rows, TokenRows) else len(next(iter(rows.values())))
    names = [*outputs, NUM_TOKENS.name] if NUM_TOKENS.name in front.names("outputs") else outputs
    slots = asyncio.Semaphore(_AT_ONCE)

    async def part(first: int) -> Tensors:
        last = first + size
        if isinstance(rows, TokenRows):
            columns = rows.columns(first, last)
        else:
            columns = {name: values[first:last] for name, values in rows.items()}
        named = {**parameters, **target.parameters}
        call = ModelCall(front.name, columns, context.timeout_s, names, named, context.request_id)
        async with slots:
            try:
                return await context.gateway.upstream.infer(call)
            except ModelError as error:
                raise renumbered(error, lambda row: row + first) from None

    if count <= size:
        tensors = await part(0)
    else:
        tasks = [asyncio.ensure_future(part(first)) for first in range(0, count, size)]
        try:
            parts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        tensors = {name: _joined([one[name] for one in parts]) for name in names}
    tokens = int(tensors[NUM_TOKENS.name].sum()) if NUM_TOKENS.name in tensors else 0
    context.meter.count(front.name, tokens)
    return tensors, tokens


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The rows of all parts; those of a part that is padded to fewer tokens get more zeros."""
    if parts[0].ndim < 2:
        return np.concatenate(parts)
    longest = max(part.shape[1] for part in parts)
    rest = [(0, 0)] * (parts[0].ndim - 2)
    return np.concatenate([np.pad(part, [(0, 0), (0, longest - part.shape[1]), *rest]) for part in parts])


def renumbered(error: ModelError, place_of: Callable[[int], int]) -> ModelError:
    """The error of one call, with the rows that it names as the request numbers them."""
    return ModelError(_ROW.sub(lambda match: f"row {place_of(int(match[1]))}", str(error)), error.code)


def require_output(target: Target, name: str) -> None:
    """Raise ApiError with status 400 for a front that lacks an output."""
    if name not in target.front.names("outputs"):
        text = f"model: {target.name} has no output {name}"
        raise ApiError(400, text, param="model", code="model_not_supported")
