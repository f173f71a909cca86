"""Linear heads over a checkpoint's pooled vector, updates of its layers beside them, and the class names of LOGITS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.engines.interfaces import Array
from shapeshift.errors import InvalidInputError

_TENSORS = ("weight", "bias")
# Of an update, after the name of its layer; as PEFT names them.
UPDATES = (".lora_A", ".lora_B")


def read_head(file: Path) -> tuple[Array, Array]:
    """The weight [labels, hidden] and bias [labels] of a head file. Raises InvalidInputError naming `head`."""
    tensors = _tensors(file)
    others = sorted(name for name in tensors if not name.endswith(UPDATES))
    if others != sorted(_TENSORS):
        raise InvalidInputError("head", str(file), f"the tensors {' and '.join(_TENSORS)}, not {others}")
    weight, bias = (tensors[name] for name in _TENSORS)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise InvalidInputError("head", [list(weight.shape), list(bias.shape)], "shapes [labels, hidden] and [labels]")
    if not all(np.isfinite(tensor).all() for tensor in tensors.values()):
        raise InvalidInputError("head", str(file), "weights and biases that are finite")
    return weight, bias


def read_updates(file: Path) -> dict[str, tuple[Array, Array]]:
    """The updates in a head file by the name of the encoder's linear layer: A [rank, inputs] and B [outputs, rank].

    The layer's weight becomes W + B A. Raises InvalidInputError for a layer that lacks one of them.
    """
    tensors = _tensors(file)
    layers = sorted({name.removesuffix(suffix) for name in tensors for suffix in UPDATES if name.endswith(suffix)})
    updates = {}
    for layer in layers:
        a, b = (tensors.get(layer + suffix, np.zeros(0)) for suffix in UPDATES)
        if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
            allowed = f"shapes [rank, inputs] and [outputs, rank] of {layer}{', '.join(UPDATES)}"
            raise InvalidInputError("head", [list(a.shape), list(b.shape)], allowed)
        updates[layer] = a, b
    return updates


def _tensors(file: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    try:
        tensors: dict[str, Array] = load_file(file)
    except Exception as error:  # noqa: BLE001  the library raises many types
        raise InvalidInputError("head", str(file), f"a safetensors file ({error})") from None
    return tensors


def head_labels(file: Path) -> tuple[str, ...]:
    """The names in the file's metadata `labels`, a JSON list with one name for each row of `weight`."""
    from safetensors import safe_open

    count = len(read_head(file)[1])
    with safe_open(file, framework="np") as opened:
        listed = (opened.metadata() or {}).get("labels")
    if listed is None:
        return _numbered(count)
    labels = json.loads(listed)
    if len(labels) != count:
        raise InvalidInputError("head", f"{len(labels)} labels", f"one for each of the {count} rows of weight")
    return tuple(map(str, labels))


def config_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in the `id2label` of a checkpoint's config.json, ordered as its logits; by default two, numbered.

    Raises InvalidInputError unless there is a name for each id from 0.
    """
    id2label = config.get("id2label")
    if not id2label:
        return _numbered(int(config.get("num_labels", 2)))
    # Keys are numbers as texts.
    names = {int(key): str(name) for key, name in id2label.items() if str(key).isdecimal()}
    missing = [index for index in range(len(id2label)) if index not in names]
    if missing:
        raise InvalidInputError(
            "id2label", sorted(id2label), f"a name for each id from 0 in config.json; {missing[0]} is missing: add it"
        )
    return tuple(names[index] for index in range(len(id2label)))


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{index}" for index in range(count))
