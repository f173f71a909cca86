"""What rank 0 tells the others before each step, as bytes: the blocks to copy, and the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from safetensors import numpy, torch

from shapeshift.fused_decode.interfaces import StepBatch

_SOURCES, _TARGETS = "copied_blocks", "copies"


def encode(batch: StepBatch, sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """The tensors of `batch` that are not None, in safetensors' format.

    sources, targets: of the blocks to copy before the step, see `Runtime.copy_blocks`.
    """
    fields = ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))
    # Two fields may be one tensor, which the functions for torch refuse to write.
    arrays = {name: tensor.contiguous().numpy() for name, tensor in fields if tensor is not None}
    if sources:
        arrays |= {_SOURCES: np.array(sources, np.int32), _TARGETS: np.array(targets, np.int32)}
    return numpy.save(arrays)


def decode(content: bytes) -> tuple[StepBatch, list[int], list[int]]:
    """The batch, and the blocks that are copied and their copies: what `encode` was given."""
    tensors = torch.load(content)
    sources, targets = (tensors.pop(name, None) for name in (_SOURCES, _TARGETS))
    copied = [[] if places is None else places.tolist() for places in (sources, targets)]
    return StepBatch(**tensors), copied[0], copied[1]
