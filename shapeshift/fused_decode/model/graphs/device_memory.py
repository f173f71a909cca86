"""What a model that generates wants of its GPU's memory. Weights, KV cache and adapters are computed, graphs estimated.

It imports torch.
"""

from __future__ import annotations

from shapeshift.engines import cuda_device, device_plan
from shapeshift.fused_decode.loading import need_of
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.graphs.bounds import CHUNKS, LEAST_CONTEXT, MIXED_ROWS, power_of_two
from shapeshift.fused_decode.model.graphs.division import parts_bytes
from shapeshift.fused_decode.model.graphs.verify import has_gpu_kernels
from shapeshift.fused_decode.settings import COMPUTED_BYTES, FusedDecodeSettings, computed
from shapeshift.serving.model_args import Log

_MIB = 2**20
_LOGIT_BYTES = 4


def of_decode(
    architecture: Architecture, decode: FusedDecodeSettings, precision: str, adapter_mb: int
) -> dict[str, str]:
    """The generated parameter of `device_plan`. adapter_mb: reserved for adapters, 0 without any."""
    graphs = graph_bytes(architecture, decode, precision, has_gpu_kernels()) / _MIB
    need = need_of(architecture, decode, precision, adapter_mb << 20)
    return device_plan.as_parameter({**need.parts(), "graphs": graphs})


def graph_bytes(architecture: Architecture, decode: FusedDecodeSettings, precision: str, in_place: bool) -> float:
    """The logits of every graph that there can be, and once, for all share it, what the largest step computes in.

    That is the activations of a layer, and what its attention needs beside them. in_place: whether attention reads keys
    and values where they lie, in kernels; the plan of the build assumes it where the kernels are installed.
    """
    slots, number = decode.max_concurrency, COMPUTED_BYTES[computed(precision)]
    contexts, rows = doublings(LEAST_CONTEXT, decode.max_length), doublings(1, slots)
    logits = contexts * (sum(power_of_two(1 << step, 1, slots) for step in range(rows)) + len(CHUNKS) * sum(MIXED_ROWS))
    tokens = max(slots, decode.prefill_tokens)
    widths = 6 * architecture.hidden + 3 * architecture.inner_width
    attention = _attention_bytes(architecture, decode, number, in_place)
    return _LOGIT_BYTES * logits * architecture.vocab_size + number * tokens * widths + attention


def require_room(
    architecture: Architecture, decode: FusedDecodeSettings, precision: str, in_place: bool, device: int, log: Log
) -> float:
    """`graph_bytes` of what this GPU has accepted. Raises EngineError where the plan had less, and it is not free."""
    needed = graph_bytes(architecture, decode, precision, in_place)
    planned = graph_bytes(architecture, decode, precision, has_gpu_kernels())
    if needed > planned:
        sizes = f"{needed / _MIB:.0f} MiB, {planned / _MIB:.0f} MiB in the memory plan"
        log(f"graphs with attention in plain torch want {sizes}")
        remedy = "lower max_concurrency or max_length"
        cuda_device.require_free(device, needed / _MIB, "graphs with attention in plain torch", remedy)
    return needed


def _attention_bytes(architecture: Architecture, decode: FusedDecodeSettings, number: int, in_place: bool) -> int:
    """What the splits of the largest step give; without our kernels, the keys and values that are gathered."""
    a, slots = architecture, decode.max_concurrency
    if not in_place:
        return 2 * slots * decode.max_length * a.kv_width * number
    rows = {min(1 << step, slots) for step in range(doublings(1, slots))}
    shapes = [*((count, 1) for count in rows), *((1, chunk) for chunk in (*CHUNKS, decode.prefill_tokens))]
    return max(parts_bytes(*shape, decode.max_length, a.heads, a.kv_heads, a.head_dim) for shape in shapes)


def doublings(least: int, most: int) -> int:
    """How many powers of two from `least` on there are up to the first that is at least `most`."""
    return max(1, (max(1, most) - 1).bit_length() - (least - 1).bit_length() + 1)
