"""Linear heads over a checkpoint's pooled vector, and the names of what a checkpoint tells apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.engines.protocol import Array
from shapeshift.errors import InvalidInputError

_TENSORS = ("weight", "bias")


def tensors(file: Path) -> tuple[Array, Array]:
    """weight [labels, hidden] and bias [labels] of a head file; InvalidInputError naming `head`."""
    from safetensors.numpy import load_file

    try:
        found = load_file(file)
    except Exception as error:  # noqa: BLE001  the library has errors of its own and lets others pass
        raise InvalidInputError("head", str(file), f"a safetensors file ({error})") from None
    if sorted(found) != sorted(_TENSORS):
        raise InvalidInputError("head", str(file), f"the tensors {' and '.join(_TENSORS)}, not {sorted(found)}")
    weight, bias = (found[name] for name in _TENSORS)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise InvalidInputError("head", [list(weight.shape), list(bias.shape)], "shapes [labels, hidden] and [labels]")
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise InvalidInputError("head", str(file), "weights and biases that are finite")
    return weight, bias


def labels_of_head(file: Path) -> tuple[str, ...]:
    """The names in the file's metadata, `labels`, a JSON list with one for each row of `weight`."""
    from safetensors import safe_open

    count = len(tensors(file)[1])
    with safe_open(file, framework="np") as opened:
        stated = (opened.metadata() or {}).get("labels")
    if stated is None:
        return _numbered(count)
    labels = json.loads(stated)
    if len(labels) != count:
        raise InvalidInputError("head", f"{len(labels)} labels", f"one for each of the {count} rows of weight")
    return tuple(map(str, labels))


def labels_of_config(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a checkpoint's config.json, `id2label`, in the order of its logits; two without any."""
    named = config.get("id2label")
    if not named:
        return _numbered(int(config.get("num_labels", 2)))
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{index}" for index in range(count))
