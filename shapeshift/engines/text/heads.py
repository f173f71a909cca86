"""Linear heads over a checkpoint's pooled vector, and the class names of LOGITS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.engines.interfaces import Array
from shapeshift.errors import InvalidInputError

_TENSORS = ("weight", "bias")


def read_head(file: Path) -> tuple[Array, Array]:
    """The weight [labels, hidden] and bias [labels] of a head file. Raises InvalidInputError naming `head`."""
    from safetensors.numpy import load_file

    try:
        found = load_file(file)
    except Exception as error:  # noqa: BLE001  the library raises many types
        raise InvalidInputError("head", str(file), f"a safetensors file ({error})") from None
    if sorted(found) != sorted(_TENSORS):
        raise InvalidInputError("head", str(file), f"the tensors {' and '.join(_TENSORS)}, not {sorted(found)}")
    weight, bias = (found[name] for name in _TENSORS)
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise InvalidInputError("head", [list(weight.shape), list(bias.shape)], "shapes [labels, hidden] and [labels]")
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise InvalidInputError("head", str(file), "weights and biases that are finite")
    return weight, bias


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
    stated = config.get("id2label")
    if not stated:
        return _numbered(int(config.get("num_labels", 2)))
    # Keys are numbers as texts.
    names = {int(key): str(name) for key, name in stated.items() if str(key).isdecimal()}
    missing = [index for index in range(len(stated)) if index not in names]
    if missing:
        raise InvalidInputError(
            "id2label", sorted(stated), f"a name for each id from 0 in config.json; {missing[0]} is missing: add it"
        )
    return tuple(names[index] for index in range(len(stated)))


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{index}" for index in range(count))
