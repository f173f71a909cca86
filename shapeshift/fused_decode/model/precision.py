"""What the values of `precision` mean: the type of the computation, and the bits of the weights."""

from __future__ import annotations

from shapeshift.engines import hardware
from shapeshift.errors import UnsupportedError

COMPUTED_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
"""Bytes of a number of the computation: an activation, a key, a value."""
WEIGHT_BITS = {"f32": 32, "bf16": 16, "f16": 16, "int8": 8, "int4": 4}
"""Bits of a weight of a layer's linear."""
QUANTISED = tuple(name for name in WEIGHT_BITS if name not in COMPUTED_BYTES)
ON_CPU = tuple(name for name in WEIGHT_BITS if name != "f16")
HEAD_BITS = 8
"""Bits of a weight of the output head of a quantised model: what is lost there changes every token."""
GROUP_SIZES = (128, 32)
KV_PRECISIONS = ("auto", "int8")
"""Values of `kv_precision`: the type of the computation, or 8 bits with a scale for each token and head."""
_SCALE_BYTES = 4


def resolve(requested: str, device: int | None = None, packed_bits: int = 0) -> str:
    """One of WEIGHT_BITS; see `hardware.resolve_precision`. Raises UnsupportedError for what the device lacks.

    device: the number of a GPU, None for the CPU. packed_bits: of weights that are quantised in the
    checkpoint, which stay as they are on a CPU with "auto"; 0: they are not.
    """
    if requested == "auto" and packed_bits and device is None:
        return f"int{packed_bits}"
    if requested not in QUANTISED:
        return hardware.resolve_precision(requested, device=device)
    if device is not None:
        raise UnsupportedError(f"precision: {requested} is for CPUs; set bf16, f16, f32 or auto for a GPU")
    return requested


def computed(precision: str) -> str:
    """f32, bf16 or f16: the type of all that is no weight of a linear.

    With quantised weights bf16 where this CPU has it, else f32.
    """
    return hardware.resolve_precision("auto") if precision in QUANTISED else precision


def vector_bytes(head_dim: int, number_bytes: int, kv_precision: str) -> int:
    """Bytes of a cached key or value of one head; number_bytes: those of a number of the computation."""
    return head_dim + _SCALE_BYTES if kv_precision == "int8" else head_dim * number_bytes


def require_kv_precision(requested: str, on_gpu: bool) -> None:
    """Raises UnsupportedError where the device lacks it."""
    if on_gpu and requested != "auto":
        raise UnsupportedError(f"kv_precision: {requested} is for CPUs; set auto for a GPU")


def group_of(bits: int, inputs: int, group_size: int = 0) -> int:
    """The inputs of a linear that share a scale, 0 for all: with 4 bits `group_size`, and where that is 0 the first of
    GROUP_SIZES that divides `inputs`, else the last one."""
    if bits == 8:
        return 0
    return group_size or next((size for size in GROUP_SIZES if inputs % size == 0), GROUP_SIZES[-1])
