"""The folder of a task, checked against the model.

task.json            name, labels, backbone (SHA-256 of the checkpoint), latency_ms, utility
prompts.safetensors  "<gamma>" for each gamma > 0: [depth, gamma, width]
head.safetensors     "<gamma>.weight" [labels, features] and "<gamma>.bias" [labels]; the default is that of gamma 0
profile.json         accuracy by gamma, and how it was measured; written by `shapeshift tasks register`
examples.npz         optional: images of that measurement, with which `make engines` verifies engines that merge tokens
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shapeshift.engines.interfaces import Array
from shapeshift.errors import InvalidInputError
from shapeshift.files import file_sha256
from shapeshift.token_adapt.request import EMBEDDING

TASK_FILE, PROMPTS_FILE, HEAD_FILE, PROFILE_FILE = (
    "task.json",
    "prompts.safetensors",
    "head.safetensors",
    "profile.json",
)
FILES = (TASK_FILE, PROMPTS_FILE, HEAD_FILE, PROFILE_FILE)
CLASSIFIER = "classifier"
_CLASSIFIER_FILE = "classifier.safetensors"
_MAX_LABELS = 100_000
# Of requests to the checkpoint's own classifier that state none, as `shapeshift tasks train` has for a task.
_LATENCY_MS, _UTILITY = 1000.0, 0.5


@dataclass(frozen=True)
class Backbone:
    """The model that a task must fit: hash, sizes and gammas."""

    sha256: str
    depth: int
    width: int
    features: int
    gammas: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """A linear layer over features: weight [labels, features], bias [labels]."""

    weight: Array
    bias: Array


@dataclass(frozen=True)
class TaskParts:
    """The content of a task; `heads` has an entry for every gamma of the model.

    prompts: for every gamma above 0, or none: the task then has none of those.
    """

    name: str
    labels: tuple[str, ...]
    latency_ms: float
    utility: float
    prompts: Mapping[int, Array]
    heads: Mapping[int, Head]


def read_task(folder: Path, backbone: Backbone) -> TaskParts:
    """The task in `folder`. Raises InvalidInputError naming the file and field that do not fit `backbone`."""
    description = read_object(folder / TASK_FILE)
    name, labels, latency_ms, utility = check(description)
    if description.get("backbone") != backbone.sha256:
        allowed = f"{backbone.sha256}, the checkpoint of the engines; train the task for it"
        raise InvalidInputError(f"{TASK_FILE}: backbone", description.get("backbone"), allowed)
    return TaskParts(
        name=name,
        labels=labels,
        latency_ms=latency_ms,
        utility=utility,
        prompts=_prompts(_tensors(folder / PROMPTS_FILE), backbone),
        heads=_heads(_tensors(folder / HEAD_FILE), len(labels), backbone),
    )


def save_classifier(folder: Path, head: Head) -> None:
    """Write the checkpoint's own classifier into a folder of engines."""
    tensors = {"weight": head.weight, "bias": head.bias}
    save_file(
        {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}, folder / _CLASSIFIER_FILE
    )


def read_classifier(folder: Path, labels: tuple[str, ...], backbone: Backbone) -> TaskParts:
    """The task of what `save_classifier` wrote: it has labels, and no prompts. Raises InvalidInputError."""
    tensors = _tensors(folder / _CLASSIFIER_FILE)
    shape = (len(labels), backbone.features)
    head = Head(
        _checked_tensor(_CLASSIFIER_FILE, "weight", tensors, shape),
        _checked_tensor(_CLASSIFIER_FILE, "bias", tensors, shape[:1]),
    )
    return TaskParts(CLASSIFIER, labels, _LATENCY_MS, _UTILITY, {}, dict.fromkeys(backbone.gammas, head))


def check(description: Mapping[str, Any]) -> tuple[str, tuple[str, ...], float, float]:
    """Name, labels, latency_ms and utility from task.json. Raises InvalidInputError naming the field."""
    latency_ms, utility = _number(description, "latency_ms", above=0.0), _number(description, "utility")
    return _name(description.get("name")), _labels(description.get("labels")), latency_ms, utility


def read_accuracy(folder: Path, gammas: Sequence[int]) -> dict[int, float]:
    """The profiled accuracy (0..1) of each gamma. Raises InvalidInputError naming a missing or invalid one."""
    profiled = read_object(folder / PROFILE_FILE).get("accuracy")
    accuracy = {}
    for gamma in gammas:
        value = profiled.get(str(gamma)) if isinstance(profiled, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            allowed = "a number from 0 to 1 for every gamma of the model; measure it with `shapeshift tasks register`"
            raise InvalidInputError(f"{PROFILE_FILE}: accuracy of gamma {gamma}", value, allowed)
        accuracy[gamma] = float(value)
    return accuracy


def sha256(folder: Path) -> str:
    """The hash of the task files. Raises InvalidInputError naming a missing one."""
    digest = hashlib.sha256()
    for name in FILES:
        if not (folder / name).is_file():
            raise InvalidInputError("task folder", str(folder), f"a folder that contains {name}")
        digest.update(f"{name}:{file_sha256(folder / name)}\n".encode())
    return digest.hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises InvalidInputError naming a file without one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(file.name, str(file), f"a readable file ({error.strerror})") from None
    except ValueError as error:
        raise InvalidInputError(file.name, str(file), f"JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidInputError(file.name, value, "a JSON object")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.replace("_", "").replace("-", "").isalnum():
        raise InvalidInputError(f"{TASK_FILE}: name", value, "up to 64 letters, digits, - and _")
    if value == EMBEDDING:
        raise InvalidInputError(f"{TASK_FILE}: name", value, "another name: this is the task of vectors")
    return value


def _labels(value: Any) -> tuple[str, ...]:
    valid = isinstance(value, list) and 2 <= len(value) <= _MAX_LABELS and all(isinstance(one, str) for one in value)
    if not valid or len(set(value)) < len(value):
        raise InvalidInputError(f"{TASK_FILE}: labels", value, f"2 to {_MAX_LABELS} different strings")
    for label in value:
        try:
            label.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(f"{TASK_FILE}: labels", label, "text that UTF-8 can hold") from None
    return tuple(value)


def _number(description: Mapping[str, Any], name: str, above: float = -math.inf) -> float:
    value = description.get(name)
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or not number > above or number < 0:
        raise InvalidInputError(f"{TASK_FILE}: {name}", value, "a finite number, 0 or more" if above < 0 else "above 0")
    return float(number)


def _tensors(file: Path) -> dict[str, Array]:
    try:
        return load_file(file)
    except OSError as error:
        raise InvalidInputError(file.name, str(file), f"a readable file ({error.strerror})") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(file.name, str(file), f"safetensors in f32 or f16 ({error})") from None


def _checked_tensor(file: str, name: str, tensors: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
    value = tensors.get(name)
    if value is None or value.shape != shape or value.dtype not in (np.float32, np.float16):
        actual = None if value is None else f"{value.dtype} {value.shape}"
        raise InvalidInputError(f"{file}: {name}", actual, f"f32 or f16 of shape {shape}")
    if not np.isfinite(value).all():
        raise InvalidInputError(f"{file}: {name}", "NaN or infinity", "finite numbers")
    return value.astype(np.float32)


def _prompts(tensors: Mapping[str, Array], backbone: Backbone) -> dict[int, Array]:
    shapes = {gamma: (backbone.depth, gamma, backbone.width) for gamma in backbone.gammas if gamma > 0}
    return {gamma: _checked_tensor(PROMPTS_FILE, str(gamma), tensors, shape) for gamma, shape in shapes.items()}


def _heads(tensors: Mapping[str, Array], labels: int, backbone: Backbone) -> dict[int, Head]:
    shape = (labels, backbone.features)
    heads = {}
    for gamma in {0, *backbone.gammas}:
        source = gamma if f"{gamma}.weight" in tensors else 0
        heads[gamma] = Head(
            _checked_tensor(HEAD_FILE, f"{source}.weight", tensors, shape),
            _checked_tensor(HEAD_FILE, f"{source}.bias", tensors, shape[:1]),
        )
    return heads
