"""What a step computes for each token beside linears and attention, as one kernel of a GPU each.

In OpenAI's Triton, as `gpu_kernels`. In plain torch an RMS norm with its sum and its cast is three launches, and SiLU
with its product four: in a step of few tokens launches take longer than what they compute. Arithmetic is f32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_INNER = 1024
"""Elements of a program of `_gate`."""
_WIDE, _WARPS = 2048, 8
"""From so many elements of a row on, its program has more warps than the usual four."""


@triton.jit
def _add_norm(state, delta, weight, normed, width, eps, padded: tl.constexpr, adds: tl.constexpr):
    """One row of `state` [rows, width], to which that of `delta` is added, and of its norm."""
    row = tl.program_id(0).to(tl.int64) * width
    element = tl.arange(0, padded)
    is_there = element < width
    values = tl.load(state + row + element, mask=is_there, other=0.0)
    if adds:
        values += tl.load(delta + row + element, mask=is_there, other=0.0).to(tl.float32)
        tl.store(state + row + element, values, mask=is_there)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    scaled = values * factor * tl.load(weight + element, mask=is_there, other=0.0)
    tl.store(normed + row + element, scaled.to(normed.dtype.element_ty), mask=is_there)


@triton.jit
def _gate(both, inner, width, block: tl.constexpr):
    """Some elements of a row of `inner` [rows, width], from `both` [rows, 2 width]."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * block + tl.arange(0, block)
    is_there = element < width
    source = both + row * 2 * width + element
    first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(source + width, mask=is_there, other=0.0).to(tl.float32)
    value = first / (1.0 + tl.exp(-first)) * second
    tl.store(inner + row * width + element, value.to(inner.dtype.element_ty), mask=is_there)


def add_norm(
    state: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """See `network.Operations.add_norm`."""
    rows, width = state.shape
    assert state.is_contiguous() and (delta is None or delta.is_contiguous())
    normed = torch.empty_like(state, dtype=dtype)
    padded = triton.next_power_of_2(width)
    with torch.cuda.device(state.get_device()):
        _add_norm[(rows,)](
            *(state, state if delta is None else delta, weight, normed, width, eps),
            padded=padded,
            adds=delta is not None,
            num_warps=_WARPS if padded >= _WIDE else 4,
        )
    return normed


def gate(both: torch.Tensor) -> torch.Tensor:
    """See `torch_operations.StepKernels.gate`."""
    rows, width = len(both), both.shape[1] // 2
    assert both.is_contiguous()
    inner = both.new_empty(rows, width)
    with torch.cuda.device(both.get_device()):
        _gate[(rows, triton.cdiv(width, _INNER))](both, inner, width, block=_INNER)
    return inner
