"""Which kernels compute a step: those of a GPU, held there against plain torch, see `kernel_check`; or plain torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.graphs import kernel_check
from shapeshift.fused_decode.model.network import AttentionLayer, Network
from shapeshift.fused_decode.model.torch_operations import PLAIN, Rows, StepKernels, TorchOperations
from shapeshift.serving.model_args import Log
from shapeshift.settings import Choices

GPU_KERNELS: Choices[StepKernels] = Choices(
    "decode_kernels", {"cuda": "shapeshift.fused_decode.model.graphs.gpu_kernels:KERNELS"}
)

_ROWS = ((3, 1, 64), (3, 1, 256), (1, 24, 64), (1, 24, 256))
"""Rows, tokens of each and places of each text: single tokens and chunks, with and without splits."""


def has_gpu_kernels() -> bool:
    """Whether the package is installed in whose language `gpu_kernels` are: torch for CUDA brings it."""
    return importlib.util.find_spec("triton") is not None


def step_kernels(on_gpu: bool) -> StepKernels:
    """The kernels of a GPU; on a CPU, and without the package that they need, plain torch."""
    return GPU_KERNELS["cuda"] if on_gpu and has_gpu_kernels() else PLAIN


def kernels_for(network: Network, device: torch.device, log: Log) -> StepKernels:
    """The kernels of a network on its device, `verified` there."""
    layers = [layer.attention for layer in network.layers if isinstance(layer.attention, AttentionLayer)]
    with torch.inference_mode():
        return verified(step_kernels(device.type == "cuda"), layers, network.architecture.heads, log)


def verified(kernels: StepKernels, layers: Sequence[AttentionLayer], heads: int, log: Log) -> StepKernels:
    """`kernels`, where they give for such layers what plain torch gives; else plain torch, and the log says why.

    It compiles what the model's steps need.
    """
    if kernels is PLAIN:
        return kernels
    kinds = {(one.window, one.scale, one.score_cap, one.query_norm is None): one for one in layers}

    def errors() -> Iterator[float]:
        yield from (_error(kernels, layer, heads, *rows) for layer in kinds.values() for rows in _ROWS)
        yield from _row_errors(kernels, layers[0].keys)

    return kernels if kernel_check.are_right(errors, "attention in plain torch", log) else PLAIN


def _error(kernels: StepKernels, layer: AttentionLayer, heads: int, rows: int, length: int, context: int) -> float:
    """The largest difference from plain torch, as a share of the largest value, over random texts."""
    device, dtype, (_, kv_heads, _, head_dim) = layer.keys.device, layer.keys.dtype, layer.keys.shape
    chance = torch.Generator().manual_seed(0)
    longest = min(context, layer.cosines.shape[1])
    length = min(length, longest)
    cache = torch.randn(2, rows * context // BLOCK_TOKENS, kv_heads, BLOCK_TOKENS, head_dim, generator=chance)
    qkv = torch.randn(rows * length, (heads + 2 * kv_heads) * head_dim, generator=chance).to(device, dtype)
    starts = torch.tensor([(longest - length) // (row + 1) for row in range(rows)])
    positions = (starts[:, None] + torch.arange(length)).to(device)
    blocks = torch.randperm(cache.shape[1], generator=chance).view(rows, -1).to(device)
    fixed = Rows(slice(None), positions, torch.zeros(rows, dtype=torch.int64, device=device), blocks)

    def mixed(by: StepKernels) -> torch.Tensor:
        keys, values = cache.to(device, dtype)
        drawn = replace(layer, keys=keys, values=values)
        return TorchOperations(device, by).attention(qkv, drawn, (fixed,))

    return kernel_check.difference(mixed(kernels), mixed(PLAIN))


def _row_errors(kernels: StepKernels, like: torch.Tensor) -> Iterator[float]:
    """As `_error`, of a norm and of a gate, for random rows of the dtype and the device of `like`."""
    chance = torch.Generator().manual_seed(0)
    state, delta, weight, both = (
        torch.randn(3, width, generator=chance).to(like.device) for width in (200, 200, 200, 400)
    )

    def normed(by: StepKernels) -> torch.Tensor:
        total = state.clone()
        return torch.cat([by.add_norm(total, delta.to(like.dtype), weight[0], 1e-6, like.dtype).float(), total])

    for of_rows in (normed, lambda by: by.gate(both.to(like.dtype))):
        yield kernel_check.difference(of_rows(kernels), of_rows(PLAIN))
