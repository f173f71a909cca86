"""The graphs that are captured when a model is loaded, so that no request waits for them: those of common steps.

Common are the steps of prompts that one chunk holds, and of texts that are not yet longer than such a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from shapeshift.fused_decode.interfaces import StepBatch, blocks_of
from shapeshift.fused_decode.model.graphs.bounds import (
    CHUNKS,
    LEAST_CONTEXT,
    GraphBounds,
    mixed_rows,
    power_of_two,
)
from shapeshift.serving.model_args import Log

_MOST_S = 30.0
"""Seconds after which no further graph is begun: a model must become ready."""


def common_bounds(slots: int, max_length: int, longest: int, prefill_tokens: int) -> list[GraphBounds]:
    """The bounds of common steps, the largest first: the others find the memory that they compute in in its.

    slots, longest: see `bounds.bounds_of`; max_length: most tokens of a text; prefill_tokens: most tokens of prompts in
    a step.
    """
    prompt = min(prefill_tokens, max_length)
    chunks = [chunk for least, chunk in zip((1, *CHUNKS), CHUNKS, strict=False) if least < prompt]
    contexts = {power_of_two(chunk, LEAST_CONTEXT, longest) for chunk in (LEAST_CONTEXT, *chunks)}
    rows = {power_of_two(count, 1, slots) for count in range(1, slots + 1)}
    beside = {mixed_rows(singles, slots) for singles in range(slots)}
    bounds = {GraphBounds(count, context) for count in rows for context in contexts}
    bounds |= {GraphBounds(count, power_of_two(c, LEAST_CONTEXT, longest), c) for count in beside for c in chunks}
    return sorted(bounds, key=lambda one: (one.rows + one.chunk, one.context), reverse=True)


def step_within(bounds: GraphBounds, slots: int, max_length: int) -> StepBatch:
    """A step that these bounds of `common_bounds` hold, and no smaller ones. It writes into the first blocks."""
    rows = min(bounds.rows, slots - bool(bounds.chunk))
    lengths = torch.ones(rows + bool(bounds.chunk), dtype=torch.int32)
    starts = torch.full_like(lengths, min(bounds.context, max_length) - 1)
    if bounds.chunk:
        lengths[-1], starts[-1] = min(bounds.chunk, max_length), 0
    numbers = torch.arange(len(lengths), dtype=torch.int32)
    blocks = torch.arange(blocks_of(bounds.context), dtype=torch.int32).repeat(len(numbers), 1)
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    return StepBatch(tokens, numbers, starts, lengths, numbers.long(), spans=starts + lengths, blocks=blocks)


def capture(
    run: Callable[[StepBatch], object],
    steps: Sequence[StepBatch],
    most_bytes: float,
    used_bytes: Callable[[], float],
    log: Log,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run these steps, whose graphs are captured by that, until _MOST_S seconds or `most_bytes` are spent.

    used_bytes: of the device, by this process. Raises what `run` raises, such as EngineError for a full GPU.
    """
    began, before = clock(), used_bytes()
    for count, step in enumerate(steps):
        took, taken = clock() - began, used_bytes() - before
        spent = f"{_MOST_S:.0f} s are spent" if took >= _MOST_S else f"{most_bytes / 2**20:.0f} MiB are planned"
        if took >= _MOST_S or taken >= most_bytes:
            log(f"{count} of {len(steps)} graphs captured in {took:.1f} s, {spent}; the others with their first steps")
            return
        run(step)
    log(f"{len(steps)} graphs captured in {clock() - began:.1f} s; others with their first steps")
