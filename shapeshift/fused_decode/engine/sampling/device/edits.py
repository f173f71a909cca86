"""Logits on a device, as `logit_edits` changes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.fused_decode.engine.sampling.logit_edits import Floats, Integers


class DeviceLogits:
    """See `logit_edits.EditableLogits`: a tensor. What is changed is computed on the CPU; the logits stay."""

    def __init__(self, values: torch.Tensor) -> None:
        self.size = values.shape[1]
        self._values = values

    def keep(self, row: int, allowed: npt.NDArray[np.bool_]) -> None:
        self._values[row].masked_fill_(~moved(allowed, self._values), float("-inf"))

    def forbid(self, rows: Integers, tokens: Integers) -> None:
        self._values[moved(rows, self._values), moved(tokens, self._values)] = float("-inf")

    def add(self, rows: Integers, tokens: Integers, amounts: Floats) -> None:
        self._values[moved(rows, self._values), moved(tokens, self._values)] += moved(amounts, self._values)

    def penalise(self, rows: Integers, tokens: npt.NDArray[np.int32], penalties: Floats) -> None:
        places, named = moved(rows, self._values)[:, None], moved(tokens, self._values).long()
        scores, penalty = self._values[places, named], moved(penalties, self._values)[:, None]
        self._values[places, named] = torch.where(scores > 0, scores / penalty, scores * penalty)


def moved(array: npt.NDArray[Any], beside: torch.Tensor) -> torch.Tensor:
    """`array` as a tensor on the device of `beside`. A GPU is not waited for: the copy is of page-locked memory."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if beside.is_cuda else tensor).to(beside.device, non_blocking=True)
