"""Whether weights and cache fit before either is allocated."""

from __future__ import annotations

from collections.abc import Callable

from shapeshift.errors import InvalidInputError

_MIB = 2**20


def require_memory(
    weights: int, slot: int, slots: int, max_length: int, limit_mb: int, available_mb: float, log: Callable[[str], None]
) -> None:
    """Log the bound that the process' weights and cache keep to, and refuse one that does not fit.

    weights, slot: bytes of the weights, with whatever else is there from the start, and of one slot's cache;
    limit_mb: `memory_mb`, 0 for what is available.
    Raises InvalidInputError naming the setting, its value and the greatest that fits.
    """
    allowed = min(limit_mb or available_mb, available_mb)
    bound = (weights + slots * slot) / _MIB
    source = "memory_mb" if limit_mb and limit_mb <= available_mb else "available"
    log(
        f"memory bound {bound:.0f} MiB: weights {weights / _MIB:.0f} MiB, {slots} slots of {max_length} tokens "
        f"{slots * slot / _MIB:.0f} MiB; {source}: {allowed:.0f} MiB"
    )
    if bound <= allowed:
        return
    fitting = int((allowed * _MIB - weights) // slot)
    if fitting >= 1:
        raise InvalidInputError(
            "max_concurrency", slots, f"at most {fitting} with max_length {max_length} in {allowed:.0f} MiB ({source})"
        )
    raise InvalidInputError(
        "memory_mb", limit_mb, f"at least {(weights + slot) / _MIB + 1:.0f} for one slot; {allowed:.0f} MiB {source}"
    )
