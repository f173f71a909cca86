"""The architecture of a causal language model of the Llama family, read from a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.settings import require

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3")
PRECISION_BYTES = {"f32": 4, "bf16": 2}
_DEFAULT_THETA = 10_000.0
_DEFAULT_WINDOW = 4096


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: the base, and the scaling of the frequencies.

    kind      default; linear (all divided by `factor`); llama3 (low frequencies divided, high ones kept)
    low, high, original  llama3 only: `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`
    """

    theta: float = _DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama family: RMS norm, rotary positions, grouped-query attention, gated SiLU.

    head_dim is even, and heads a multiple of kv_heads. windows: for each layer the number of latest tokens that a
    token attends to, itself included; 0: all.
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope: Rope
    max_position: int
    windows: tuple[int, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    eos_ids: frozenset[int]

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @classmethod
    def read(cls, folder: Path) -> Architecture:
        """The architecture of the checkpoint in `folder`; generation_config.json may add end-of-sequence ids.

        Raises InvalidInputError with the key, its value and the supported values for anything that this runtime would
        compute differently from the model's training.
        """
        config = _json(folder / "config.json")
        generation = folder / "generation_config.json"
        extra = _json(generation).get("eos_token_id") if generation.is_file() else None
        return from_config(config, extra)


def from_config(config: Mapping[str, Any], generation_eos: object = None) -> Architecture:
    """The architecture that the content of a config.json describes. Raises InvalidInputError."""
    family = config.get("model_type")
    require(family in FAMILIES, "model_type", family, f"one of {', '.join(FAMILIES)}")
    require(config.get("hidden_act", "silu") == "silu", "hidden_act", config.get("hidden_act"), "silu")
    quantised = config.get("quantization_config")
    require(not quantised, "quantization_config", quantised, "weights in f32, f16 or bf16")
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads")
    require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    head_dim = hidden // heads if config.get("head_dim") is None else _count(config, "head_dim")
    require(head_dim % 2 == 0, "head_dim", head_dim, "even")
    layers, vocab_size = _count(config, "num_hidden_layers"), _count(config, "vocab_size")
    max_position = _count(config, "max_position_embeddings")
    any_bias = config.get("attention_bias", False) is True and family in ("llama", "qwen3")
    return Architecture(
        family=str(family),
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_count(config, "intermediate_size"),
        norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, max_position),
        max_position=max_position,
        windows=_windows(config, str(family), layers),
        qkv_bias=family == "qwen2" or any_bias,
        output_bias=any_bias,
        mlp_bias=config.get("mlp_bias", False) is True and family == "llama",
        qk_norm=family == "qwen3",
        tied=config.get("tie_word_embeddings", False) is True,
        eos_ids=_eos(config.get("eos_token_id"), vocab_size) | _eos(generation_eos, vocab_size),
    )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidInputError("checkpoint", str(path.parent), f"must hold a readable {path.name}") from None
    except ValueError as error:
        raise InvalidInputError("checkpoint", str(path), f"not JSON: {error}") from None
    require(isinstance(content, dict), "checkpoint", str(path), "a JSON object")
    return dict(content)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInputError(key, value, "a whole number of at least 1 (config.json)")
    return value


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidInputError(key, value, "a number above 0 (config.json)")
    return float(value)


def _rope(config: Mapping[str, Any], max_position: int) -> Rope:
    """The rotary settings, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    require(isinstance(stated, dict), "rope_parameters", stated, "an object or null")
    values = {"rope_theta": config.get("rope_theta", _DEFAULT_THETA), **stated}
    kind = values.get("rope_type", values.get("type", "default"))
    require(kind in ROPE_KINDS, "rope_type", kind, f"one of {', '.join(ROPE_KINDS)}")
    part = values.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    require(part == 1.0, "partial_rotary_factor", part, "1")
    theta = _positive(values, "rope_theta")
    if kind == "default":
        return Rope(theta)
    factor = _positive(values, "factor")
    if kind == "linear":
        return Rope(theta, kind, factor)
    low, high = _positive(values, "low_freq_factor"), _positive(values, "high_freq_factor")
    require(high > low, "high_freq_factor", high, f"above low_freq_factor ({low})")
    original = _positive(values, "original_max_position_embeddings", max_position)
    return Rope(theta, kind, factor, low, high, int(original))


def _windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    if family == "llama":
        return (0,) * layers
    if family == "mistral":
        kinds = config.get("layer_types")
        require(kinds is None, "layer_types", kinds, "not supported for mistral")
        stated = config.get("sliding_window", _DEFAULT_WINDOW)
        return (0 if stated is None else _count({"sliding_window": stated}, "sliding_window"),) * layers
    if config.get("use_sliding_window", False) is not True or config.get("sliding_window", _DEFAULT_WINDOW) is None:
        return (0,) * layers
    window = _count({"sliding_window": config.get("sliding_window", _DEFAULT_WINDOW)}, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    windows = {"full_attention": 0, "sliding_attention": window}
    valid = isinstance(kinds, list) and len(kinds) == layers and all(kind in windows for kind in kinds)
    require(valid, "layer_types", kinds, f"{layers} of {', '.join(windows)}")
    return tuple(windows[kind] for kind in kinds)


def _eos(stated: object, vocab_size: int) -> frozenset[int]:
    values = [] if stated is None else stated if isinstance(stated, list) else [stated]
    for value in values:
        valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
        require(valid, "eos_token_id", stated, f"ids from 0 to {vocab_size - 1}")
    return frozenset(values)
