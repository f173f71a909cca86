"""Where an adapter's factors lie once they are loaded, for every linear of a base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shapeshift.fused_decode.adjust import DOWN, GATE_UP, LINEARS, OUTPUT, QKV
from shapeshift.fused_decode.architecture import Architecture

ALIGNMENT = 32
"""Elements; factors begin at multiples of it."""
PARTS = 3
FIELDS = 4
OFFSET, RANK, FIRST, OUTPUTS = range(FIELDS)

TARGETS = {
    "self_attn.q_proj": (QKV, 0),
    "self_attn.k_proj": (QKV, 1),
    "self_attn.v_proj": (QKV, 2),
    "self_attn.o_proj": (OUTPUT, 0),
    "mlp.gate_proj": (GATE_UP, 0),
    "mlp.up_proj": (GATE_UP, 1),
    "mlp.down_proj": (DOWN, 0),
}
"""A checkpoint's linears, and where the runtime has them: linear, and part of its outputs."""


@dataclass(frozen=True)
class Part:
    """A part of a linear: of `inputs` numbers it makes the linear's outputs from `first` on, `outputs` of them."""

    inputs: int
    first: int
    outputs: int


@dataclass(frozen=True)
class Factor:
    """One low-rank term: A [rank, inputs] and B [outputs, rank] of a part of a layer's linear.

    scale  what B is multiplied with
    a, b   names of the tensors in the adapter's file
    """

    layer: int
    linear: int
    part: int
    rank: int
    scale: float
    a: str
    b: str


def parts(a: Architecture) -> dict[tuple[int, int], Part]:
    """The parts of a layer's linears, by linear and part."""
    query, kv, inner = a.query_width, a.kv_width, a.intermediate
    return {
        (QKV, 0): Part(a.hidden, 0, query),
        (QKV, 1): Part(a.hidden, query, kv),
        (QKV, 2): Part(a.hidden, query + kv, kv),
        (OUTPUT, 0): Part(query, 0, a.hidden),
        (GATE_UP, 0): Part(a.hidden, 0, inner),
        (GATE_UP, 1): Part(a.hidden, inner, inner),
        (DOWN, 0): Part(inner, 0, a.hidden),
    }


def places(architecture: Architecture, factors: Sequence[Factor]) -> tuple[torch.Tensor, int]:
    """Where each factor begins, and the elements that all of them take.

    INT64 [layers, LINEARS, PARTS, FIELDS], as `adjust.LowRank` has them for each adapter. B lies transposed.
    """
    known = parts(architecture)
    made = torch.zeros(architecture.layers, LINEARS, PARTS, FIELDS, dtype=torch.int64)
    end = 0
    for factor in factors:
        part = known[factor.linear, factor.part]
        row = torch.tensor([end, factor.rank, part.first, part.outputs])
        made[factor.layer, factor.linear, factor.part] = row
        end += -(-factor.rank * (part.inputs + part.outputs) // ALIGNMENT) * ALIGNMENT
    return made, end


def moved(relative: torch.Tensor, start: int) -> torch.Tensor:
    """The places of an adapter that begins at element `start`."""
    made = relative.clone()
    made[..., OFFSET] += start
    return made
