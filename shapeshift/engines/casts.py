"""Conversions of tensors in modules that are exported."""

from __future__ import annotations

import torch


def to_f32(values: torch.Tensor) -> torch.Tensor:
    """`values` in f32. Without the condition, exporters would write a conversion that does nothing."""
    return values if values.dtype == torch.float32 else values.float()
