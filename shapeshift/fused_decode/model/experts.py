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

    def __init__(
        self,
        experts: Experts,
        router: Linear,
        gate_up: Sequence[Linear],
        down: Sequence[Linear],
        correction: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        """router: of rows in f32; the score of a shared expert follows those of the others. gate_up and down: of each
        expert, of a shared one last. correction, scales: see `choose`."""
        self._experts, self._router, self._correction, self._scales = experts, router, correction, scales
        self._gate_up, self._down = gate_up, down
        self._native = _native(experts, gate_up, down)

    def __call__(self, rows: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
        """scored: the rows that the router reads, which may have another norm."""
        chosen, weights = choose(self._experts, self.scores(scored), self._correction, self._scales)
        return (self.mixed if self._native is None else self.mixed_natively)(rows, chosen, weights)

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """What the router makes of rows, FLOAT32 [tokens, experts]; that of a shared expert with a gate follows."""
        return self._router(rows.float())

    def mixed_natively(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `mixed`, by the native kernels: a row's result does not depend on the others."""
        out: torch.Tensor = self._native.forward(rows, chosen, weights)
        return out

    def mixed(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sums in plain torch, the reference of `kernels/experts.h`: see `choose`."""
        if self._experts.shared:
            chosen = functional.pad(chosen, (0, 1), value=self._experts.count)
        count, scales = chosen.shape[1], self._experts.scales_rows
        # Pairs of a token and an expert, by expert.
        pairs = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=len(self._down)).cumsum(0)
        results = torch.empty(len(pairs), rows.shape[1])
        for number, places in enumerate(pairs.tensor_split(ends[:-1])):
            if len(places):
                taken = rows[places // count]
                if scales and number < self._experts.count:
                    taken = (taken.float() * weights.flatten()[places, None]).to(rows.dtype)
                inner = gated(self._gate_up[number](taken), self._experts)
                results[places] = self._down[number](inner).float()
        if scales:
            weights = weights.clone()
            weights[:, : self._experts.chosen] = 1.0
        return (results.view(-1, count, rows.shape[1]) * weights[..., None]).sum(dim=1).to(rows.dtype)


def choose(
    experts: Experts,
    scores: torch.Tensor,
    correction: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token INT64 [tokens, chosen] and their weights FLOAT32, of FLOAT32 scores [tokens, count].

    The weight of a shared expert follows in one more column, of its score, if it has one.
    correction: FLOAT32 [count], added to weights for the choice alone. scales: FLOAT32 [count], factors of the weights.
    """
    routed = scores if scores.shape[1] == experts.count else scores[:, : experts.count]
    # Scores have the order of their weights.
    merits = routed if correction is None else _chances(experts, routed) + correction
    if experts.groups > 1:
        merits = _in_best_groups(merits, experts.groups, experts.chosen_groups)
    chosen = merits.topk(experts.chosen, dim=-1).indices
    if experts.shares and not experts.sigmoid:
        # Those of a softmax over all, divided by their sum.
        weights = routed.gather(1, chosen).softmax(dim=-1)
    else:
        weights = _chances(experts, routed).gather(1, chosen)
        if experts.shares:
            weights = weights / weights.sum(dim=-1, keepdim=True)
    if scales is not None:
        weights = weights * scales[chosen]
    if experts.scale != 1:
        weights = weights * experts.scale
    if experts.shared_gate:
        weights = torch.cat([weights, _sigmoid(scores[:, experts.count :])], dim=1)
    elif experts.shared:
        weights = functional.pad(weights, (0, 1), value=1.0)
    return chosen, weights


def _chances(experts: Experts, routed: torch.Tensor) -> torch.Tensor:
    return _sigmoid(routed) if experts.sigmoid else routed.softmax(dim=-1)


def _sigmoid(scores: torch.Tensor) -> torch.Tensor:
    """By a softmax, which torch computes row by row: the last bit of a sigmoid depends on how many there are."""
    return torch.stack([scores, torch.zeros_like(scores)], dim=-1).softmax(dim=-1)[..., 0]


def _in_best_groups(merits: torch.Tensor, groups: int, chosen: int) -> torch.Tensor:
    """Merits [tokens, count], -inf outside of the `chosen` groups in which the two highest have the largest sums."""
    by_group = merits.view(len(merits), groups, -1)
    best = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(chosen, dim=-1).indices
    outside = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
    return by_group.masked_fill(outside[..., None], float("-inf")).view_as(merits)


def gated(both: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The gated halves of rows: SiLU or GELU, or with a limit that of gpt-oss, whose halves are clamped."""
    gate, up = both.float().chunk(2, dim=-1)
    if experts.limit:
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit) + 1.0
        return (gate * torch.sigmoid(experts.alpha * gate) * up).to(both.dtype)
    gate = functional.gelu(gate, approximate="tanh") if experts.gelu else functional.silu(gate)
    return (gate * up).to(both.dtype)


def _native(experts: Experts, gate_up: Sequence[Linear], down: Sequence[Linear]) -> Any:
    """The object of `kernels/experts.h`; None where the linears are not native."""
    if not isinstance(down[0], NativeLinear):
        return None
    kind = down[0].weight.kind.removeprefix("Linear")
    make = getattr(torch.classes.shapeshift_decode, f"Experts{kind}")
    native = make(experts.alpha, experts.limit, experts.gelu, experts.scales_rows)
    for number, (first, last) in enumerate(zip(gate_up, down, strict=True)):
        assert isinstance(first, NativeLinear) and isinstance(last, NativeLinear), "a network mixes kinds of linears"
        (native.add if number < experts.count else native.add_shared)(first.packed, last.packed)
    return native
