"""Compile the attention kernels for GPUs, on a machine without one: `python -m tests.fused_decode.compiled_attention`.

Prints the bytes of shared memory that they want at most, by compute capability (90: 9.0), as JSON. In a process of its
own, where no variable of the tests has kernels interpreted.
"""

from __future__ import annotations

import json

import torch

from shapeshift.fused_decode.interfaces import BLOCK_TOKENS
from shapeshift.fused_decode.model.network import AttentionLayer
from shapeshift.fused_decode.model.torch_operations import Rows, StepKernels
from tests.gpu_kernels import Recorder

TARGETS = ((75, torch.float16), (86, torch.float32), (90, torch.bfloat16))
SHAPES = ((32, 8, 128, 0, 0.0), (8, 4, 256, 2047, 50.0))
"""Heads, kv_heads, head_dim, window and cap of scores."""
ROWS = ((1, 1), (64, 1), (1, 256))
CONTEXT = 4096


def launch(
    attention: StepKernels, dtype: torch.dtype, rows: int, length: int, shape: tuple[int, int, int, int, float]
) -> None:
    """The kernels of rows of this length. The tensors have no memory: what would read them fails."""
    heads, kv_heads, head_dim, window, score_cap = shape
    with torch.device("meta"):
        cache = torch.empty(9, 2, kv_heads, BLOCK_TOKENS, head_dim, dtype=dtype)
        table, norm = torch.empty(8, CONTEXT, head_dim // 2), torch.empty(head_dim)
        keys, values = cache[:, 0], cache[:, 1]
        layer = AttentionLayer(keys, values, table, table, norm, norm, 1e-6, window, 0.1, score_cap)
        numbers = torch.empty(rows, length + CONTEXT // BLOCK_TOKENS + 1, dtype=torch.int64)
        given = Rows(slice(None), numbers[:, :length], numbers[:, length], numbers[:, length + 1 :])
        qkv = torch.empty(rows * length, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        mixed = torch.empty(rows * length, heads * head_dim, dtype=dtype)
        attention.read(attention.write(qkv, layer, given), layer, given, mixed)


def main() -> None:
    """See the module."""
    from shapeshift.fused_decode.model.graphs import gpu_kernels

    found = {}
    kernels = {name: getattr(gpu_kernels, name) for name in ("_place", "_attend", "_combine")}
    for capability, dtype in TARGETS:
        recorders = {name: Recorder(kernel) for name, kernel in kernels.items()}
        for name, recorder in recorders.items():
            setattr(gpu_kernels, name, recorder)
        for shape in SHAPES:
            for rows, length in ROWS:
                launch(gpu_kernels.KERNELS, dtype, rows, length, shape)
        found[capability] = max(recorder.shared_bytes(capability) for recorder in recorders.values())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
