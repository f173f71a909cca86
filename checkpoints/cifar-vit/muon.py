"""The optimisers of the demo's backbone: Muon for matrices, AdamW for all other weights."""

from __future__ import annotations

import torch
from classifier import MADE, Classifier
from torch import nn

MATRIX_RATE, OTHER_RATE, DECAY = 0.02, 3e-3, 0.05
MOMENTUM, ITERATIONS = 0.95, 5


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalised step for each matrix, in f32 (Jordan and others, 2024).

    The weight of queries, keys and values is treated as three matrices.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self) -> None:
        """Move every matrix by the learning rate, in the spectral norm."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                mean = state.setdefault("momentum", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - MOMENTUM)
                rows = MADE.width if len(matrix) == 3 * MADE.width else len(matrix)
                parts = matrix.grad.lerp(mean, MOMENTUM).split(rows)
                step = torch.cat([orthogonal(part) * max(1, len(part) / part.shape[1]) ** 0.5 for part in parts])
                matrix.mul_(1 - group["lr"] * DECAY).sub_(step, alpha=group["lr"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Approximately the nearest matrix with singular values of 1, by Newton-Schulz iterations."""
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x if len(matrix) <= matrix.shape[1] else x.T


def optimisers(model: Classifier) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    matrices = [p for p in model.vit.blocks.parameters() if p.dim() == 2]
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, MATRIX_RATE),
        torch.optim.AdamW(others, lr=OTHER_RATE, weight_decay=DECAY, betas=(0.9, 0.99)),
    ]
