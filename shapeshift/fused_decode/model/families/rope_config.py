"""The rotary settings of a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shapeshift.fused_decode.model.families.config import Config, positive
from shapeshift.fused_decode.model.parts import Rope
from shapeshift.settings import require

_ORIGINAL = "original_max_position_embeddings"
_MOST = 2**31 - 1
# The three positions of a token in mrope are the same where there is text alone.
_ALIASES = {"su": "longrope", "mrope": "default"}


def values_of(config: Config) -> dict[str, Any]:
    """`rope_parameters`, or the older `rope_theta` and `rope_scaling`, as one mapping."""
    inner = config.get("rope_parameters") or config.get("rope_scaling") or {}
    require(isinstance(inner, dict), "rope_parameters", inner, "an object or null")
    outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    return {**outer, **inner}


def by_window(values: Mapping[str, Any], *shared: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of layers without and with a window, where they differ. Older files state those of layers without; the
    others have only the keys `shared` of these."""
    kinds = "full_attention", "sliding_attention"
    if not any(kind in values for kind in kinds):
        return dict(values), {key: values[key] for key in shared if key in values}
    for kind in kinds:
        require(isinstance(values.get(kind) or {}, dict), kind, values.get(kind), "an object or null")
    whole, near = (values.get(kind) or {} for kind in kinds)
    return dict(whole), dict(near)


def read(
    config: Config, values: Mapping[str, Any], head_dim: int, max_position: int, partial: bool = False
) -> tuple[Rope, int]:
    """The rope that `values` describe, and the longest text that it is for.

    partial: whether the family can rotate a part of each head. Raises InvalidInputError.
    """
    kind = values.get("rope_type", values.get("type", "default"))
    require(isinstance(kind, str) and kind in _READERS, "rope_type", kind, f"one of {', '.join(_READERS)}")
    share = values.get("partial_rotary_factor") or 1.0
    number = isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1
    # All elements take part, those of some pairs with a frequency of 0.
    whole = kind == "proportional"
    partial = partial or whole
    require(number and (partial or share == 1.0), "partial_rotary_factor", share, "above 0, to 1" if partial else "1")
    rotated = head_dim if whole else int(head_dim * share)
    # The base of dynamic has rotated - 2 in a denominator.
    least = 4 if kind == "dynamic" else 2
    allowed = f"an even part of head_dim ({head_dim}), at least {least} elements"
    require(rotated % 2 == 0 and rotated >= least, "partial_rotary_factor", share, allowed)
    # Phi-3 states it beside the rotary settings, where it takes precedence.
    original = positive({_ORIGINAL: config.get(_ORIGINAL) or values.get(_ORIGINAL) or max_position}, _ORIGINAL)
    if kind != "default":
        require(2 <= original <= _MOST, _ORIGINAL, original, f"2 to {_MOST} (config.json)")
    theta = positive(values, "rope_theta", 10_000.0)
    require(theta > 1, "rope_theta", theta, "above 1 (config.json)")
    fields = _READERS[kind](values, int(original), max_position)
    for key in ("short", "long"):
        divisors = fields.get(key, ())
        require(len(divisors) in (0, rotated // 2), f"{key}_factor", len(divisors), f"{rotated // 2} numbers")
    turning = int(share * head_dim // 2) if whole else 0
    rope = Rope(theta=theta, kind=_ALIASES.get(kind, kind), rotated=rotated, turning=turning, **fields)
    # These stretch the texts of the training; a config.json may state the length of either.
    stretched = int(rope.original * rope.factor) if kind in ("yarn", "dynamic") else 0
    return rope, max(max_position, stretched)


def _default(values: Mapping[str, Any], original: int, max_position: int) -> dict[str, Any]:
    return {}


def _linear(values: Mapping[str, Any], original: int, max_position: int) -> dict[str, Any]:
    return {"factor": positive(values, "factor")}


def _proportional(values: Mapping[str, Any], original: int, max_position: int) -> dict[str, Any]:
    return {"factor": positive(values, "factor", 1.0)}


def _llama3(values: Mapping[str, Any], original: int, max_position: int) -> dict[str, Any]:
    low, high = positive(values, "low_freq_factor"), positive(values, "high_freq_factor")
    require(high >= low, "high_freq_factor", high, f"at least low_freq_factor ({low})")
    return {"factor": positive(values, "factor"), "low": low, "high": high, "original": original}


def _dynamic(values: Mapping[str, Any], original: int, max_position: int) -> dict[str, Any]:
    # As transformers: max_position_embeddings is the length before the scaling, whatever stands beside it.
    return {"factor": positive(values, "factor"), "original": max_position}


def _yarn(values: Mapping[str, Any], original: int, max_position: int) -> dict[str, Any]:
    factor = _factor(values, original, max_position)
    if values.get("attention_factor") is not None:
        amplitude = positive(values, "attention_factor")
    elif values.get("mscale") and values.get("mscale_all_dim"):
        amplitude = _yarn_amplitude(factor, positive(values, "mscale")) / _yarn_amplitude(
            factor, positive(values, "mscale_all_dim")
        )
    else:
        amplitude = _yarn_amplitude(factor, 1.0)
    return {
        "factor": factor,
        "low": positive({"beta_slow": values.get("beta_slow") or 1.0}, "beta_slow"),
        "high": positive({"beta_fast": values.get("beta_fast") or 32.0}, "beta_fast"),
        "original": original,
        "amplitude": amplitude,
        "truncated": values.get("truncate", True) is not False,
    }


def _yarn_amplitude(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _longrope(values: Mapping[str, Any], original: int, max_position: int) -> dict[str, Any]:
    factor = _factor(values, original, max_position)
    if values.get("attention_factor") is not None:
        amplitude = positive(values, "attention_factor")
    else:
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "factor": factor,
        "original": original,
        "amplitude": amplitude,
        "short": _divisors(values, "short_factor"),
        "long": _divisors(values, "long_factor"),
    }


def _factor(values: Mapping[str, Any], original: int, max_position: int) -> float:
    return max_position / original if values.get("factor") is None else positive(values, "factor")


def _divisors(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    divisors = values.get(key)
    require(isinstance(divisors, list) and bool(divisors), key, divisors, "a list of numbers above 0")
    return tuple(positive({key: one}, key) for one in divisors or ())


_READERS: dict[str, Callable[[Mapping[str, Any], int, int], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "mrope": _default,
    "dynamic": _dynamic,
    "proportional": _proportional,
}
