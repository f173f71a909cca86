"""The values of a config.json that several families share, each checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import token_ids
from shapeshift.settings import require

_DEFAULT_WINDOW = 4096
_MOST_LAYERS = 1024
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class Config:
    """The content of a config.json. Every method raises InvalidInputError with the key, its value and what is allowed.

    keys: what the file calls the keys of which it has other names than Llama.
    """

    def __init__(self, values: Mapping[str, Any], **keys: str) -> None:
        self.values = values
        self.keys = keys

    def name(self, key: str) -> str:
        """What the file calls the key."""
        return self.keys.get(key, key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(self.name(key), default)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; null counts as not stated where there is a default."""
        value = self.get(key, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            allowed = f"a whole number of at least {least} (config.json)"
            raise InvalidInputError(self.name(key), value, allowed)
        return value

    def layers(self) -> int:
        """`num_hidden_layers`, with a bound: of each layer there are tuples, before the weights are looked at."""
        key = "num_hidden_layers"
        layers = self.count(key)
        require(layers <= _MOST_LAYERS, self.name(key), layers, f"at most {_MOST_LAYERS} (config.json)")
        return layers

    def positive(self, key: str, default: float | None = None) -> float:
        return positive(self.values, self.name(key), default)

    def cap(self, key: str, default: float | None = None) -> float:
        """A soft cap; 0 for null."""
        return 0.0 if self.get(key, default) is None else self.positive(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether it is set; null is false, and as in Python so is 0, and other numbers are true."""
        value = self.get(key, default)
        require(value is None or isinstance(value, int), self.name(key), value, "true or false (config.json)")
        return bool(value)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse a value that is set."""
        require(not self.get(key), self.name(key), self.get(key), reason)

    def activation(self, key: str = "hidden_act", default: str = "silu", *allowed: str) -> str:
        """The activation as `network.ACTIVATIONS` calls it; `allowed`: those of the family, empty for all."""
        name = self.get(key) or default
        names = allowed or tuple(_ACTIVATIONS)
        require(name in names, self.name(key), name, f"one of {', '.join(names)}")
        return _ACTIVATIONS[name]

    def size(self) -> dict[str, Any]:
        """The fields of an Architecture that every family states."""
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", heads)
        require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        whole = self.get("head_dim") is not None or hidden % heads == 0
        require(whole, "num_attention_heads", heads, f"a divisor of hidden_size ({hidden}), or head_dim beside it")
        head_dim = self.count("head_dim", hidden // heads)
        require(head_dim % 2 == 0, "head_dim", head_dim, "even")
        vocab_size = self.count("vocab_size")
        return {
            "family": str(self.values["model_type"]),
            "vocab_size": vocab_size,
            "hidden": hidden,
            "layers": self.layers(),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_position": self.count("max_position_embeddings"),
            "eos_ids": token_ids(self.get("eos_token_id"), vocab_size),
        }

    def window(self, default: int | None = _DEFAULT_WINDOW) -> int:
        """`sliding_window`; 0 for null."""
        return 0 if self.get("sliding_window", default) is None else self.count("sliding_window", default)

    def windows(self, layers: int, window: int, default: list[int]) -> tuple[int, ...]:
        """The window of each layer, from `layer_types` or, without them, `default`."""
        kinds = self.get("layer_types")
        if kinds is None:
            return tuple(default)
        widths = {"full_attention": 0, "sliding_attention": window}
        valid = isinstance(kinds, list) and len(kinds) == layers and all(kind in tuple(widths) for kind in kinds)
        require(valid, "layer_types", kinds, f"{layers} of {', '.join(widths)}")
        return tuple(widths[kind] for kind in kinds)

    def windows_in_turns(self, window: int, turn: int) -> tuple[int, ...]:
        """Those of `windows`, where by default the last one of each `turn` layers has none."""
        layers = self.layers()
        return self.windows(layers, window, [0 if layer % turn == turn - 1 else window for layer in range(layers)])


def positive(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0. Raises InvalidInputError."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InvalidInputError(key, value, "a number above 0 (config.json)")
    return float(value)
