"""A mixture of experts: a router gives each token to a few of a layer's MLPs, whose weighted sum is its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from shapeshift.fused_decode.model.native_operations import NativeLinear
from shapeshift.fused_decode.model.network import Linear
from shapeshift.fused_decode.model.parts import Experts


class ExpertMlps:
    """From rows [tokens, hidden] to the weighted sums of what their experts make of them, in the dtype of the rows."""

    def __init__(self, experts: Experts, router: Linear, gate_up: Sequence[Linear], down: Sequence[Linear]) -> None:
        """router: of rows in f32. gate_up and down: of each expert."""
        self._experts, self._router = experts, router
        self._gate_up, self._down = gate_up, down
        self._native = _native(experts, gate_up, down)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        chosen, weights = choose(self._experts, self.scores(rows))
        return (self.mixed if self._native is None else self.mixed_natively)(rows, chosen, weights)

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """What the router makes of rows, FLOAT32 [tokens, experts]."""
        return self._router(rows.float())

    def mixed_natively(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `mixed`, by the native kernels: a row's result does not depend on the others."""
        out: torch.Tensor = self._native.forward(rows, chosen, weights)
        return out

    def mixed(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sums in plain torch, the reference of `kernels/experts.h`: see `choose`."""
        count = chosen.shape[1]
        # Pairs of a token and an expert, by expert.
        pairs = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self._experts.count).cumsum(0)
        results = torch.empty(len(pairs), rows.shape[1])
        for number, places in enumerate(pairs.tensor_split(ends[:-1])):
            if len(places):
                inner = clamped(self._gate_up[number](rows[places // count]), self._experts)
                results[places] = self._down[number](inner).float()
        return (results.view(-1, count, rows.shape[1]) * weights[..., None]).sum(dim=1).to(rows.dtype)


def choose(experts: Experts, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token INT64 [tokens, chosen] and their weights FLOAT32, of FLOAT32 scores [tokens, count]."""
    weights, chosen = scores.softmax(dim=-1).topk(experts.chosen, dim=-1)
    if experts.shares:
        weights = scores.gather(1, chosen).softmax(dim=-1)
    return chosen, weights


def clamped(both: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The gated halves of rows: SiLU, or with a limit that of gpt-oss, whose halves are clamped."""
    gate, up = both.float().chunk(2, dim=-1)
    if experts.limit:
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit) + 1.0
        return (gate * torch.sigmoid(experts.alpha * gate) * up).to(both.dtype)
    return (functional.silu(gate) * up).to(both.dtype)


def _native(experts: Experts, gate_up: Sequence[Linear], down: Sequence[Linear]) -> Any:
    """The object of `kernels/experts.h`; None where the linears are not native."""
    if not isinstance(down[0], NativeLinear):
        return None
    kind = down[0].weight.kind.removeprefix("Linear")
    native = getattr(torch.classes.shapeshift_decode, f"Experts{kind}")(experts.alpha, experts.limit)
    for first, last in zip(gate_up, down, strict=True):
        assert isinstance(first, NativeLinear) and isinstance(last, NativeLinear), "a network mixes kinds of linears"
        native.add(first.packed, last.packed)
    return native
