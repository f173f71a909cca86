"""Linear layers for few rows: weights packed once in oneDNN's layout, or plain torch where packing is unavailable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]
"""From [tokens, inputs] to [tokens, outputs], of the weights' dtype."""

_PROBE_SHAPE = (48, 32)


class PlainLinear:
    """`torch.nn.functional.linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self._weight, self._bias)


class PackedLinear:
    """oneDNN's linear over weights in its blocked layout, without a copy of the plain weights.

    Its operators are private to torch: `packs` checks that this build has them and that their results are right.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._run(rows, self._weight, self._bias, "none", [], "")
        return out


def maker(dtype: torch.dtype, log: Callable[[str], None]) -> Callable[[torch.Tensor, torch.Tensor | None], Linear]:
    """The class for linears of `dtype` on this CPU: made from weight [outputs, inputs] and bias [outputs] or None.

    Logs one line where it is the plain class.
    """
    if packs(dtype):
        return PackedLinear
    log(f"linears in plain torch, slower: this torch build or CPU has no packed linears for {dtype}")
    return PlainLinear


def packs(dtype: torch.dtype) -> bool:
    """Whether packed linears of `dtype` exist here and agree with plain ones."""
    outputs, inputs = _PROBE_SHAPE
    generator = torch.Generator().manual_seed(0)
    weight, rows, bias = (torch.randn(*shape, generator=generator) for shape in (_PROBE_SHAPE, (3, inputs), (outputs,)))
    expected = functional.linear(rows, weight, bias)
    try:
        found = PackedLinear(weight.to(dtype), bias.to(dtype))(rows.to(dtype))
    except (RuntimeError, AttributeError):
        return False
    tolerance = 1e-4 if dtype == torch.float32 else 0.2
    return bool(torch.allclose(found.float(), expected, rtol=0.0, atol=tolerance))
