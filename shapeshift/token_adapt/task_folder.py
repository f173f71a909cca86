"""A task as a folder: what it says, and whether it fits the model.

task.json            name, labels, backbone (SHA-256 of the checkpoint), latency_ms, utility
prompts.safetensors  "<gamma>" for each gamma > 0: [depth, gamma, width]
head.safetensors     "<gamma>.weight" [labels, features] and "<gamma>.bias" [labels]; a gamma without one has 0's
profile.json         measured by `shapeshift tasks register`: accuracy by gamma, and how it was measured
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
from safetensors.numpy import load_file

from shapeshift.engines.checkpoint import file_sha256
from shapeshift.engines.protocol import Array
from shapeshift.errors import InvalidInputError

TASK_FILE, PROMPTS_FILE, HEAD_FILE, PROFILE_FILE = (
    "task.json",
    "prompts.safetensors",
    "head.safetensors",
    "profile.json",
)
_MOST_LABELS = 100_000


@dataclass(frozen=True)
class Backbone:
    """What a task must fit: the model's hash, sizes and gammas."""

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
    """A task's own parameters and what it says of itself; `heads` has one for every gamma of the model."""

    name: str
    labels: tuple[str, ...]
    latency_ms: float
    utility: float
    prompts: Mapping[int, Array]
    heads: Mapping[int, Head]


def read_task(folder: Path, backbone: Backbone) -> TaskParts:
    """The task in `folder`. Raises InvalidInputError naming file and field for whatever does not fit `backbone`."""
    said = read_object(folder / TASK_FILE)
    name, labels, latency_ms, utility = check(said)
    if said.get("backbone") != backbone.sha256:
        allowed = f"{backbone.sha256}, the checkpoint that the engines were built from: train the task for it"
        raise InvalidInputError(f"{TASK_FILE}: backbone", said.get("backbone"), allowed)
    return TaskParts(
        name=name,
        labels=labels,
        latency_ms=latency_ms,
        utility=utility,
        prompts=_prompts(_tensors(folder / PROMPTS_FILE), backbone),
        heads=_heads(_tensors(folder / HEAD_FILE), len(labels), backbone),
    )


def check(said: Mapping[str, Any]) -> tuple[str, tuple[str, ...], float, float]:
    """Name, labels, latency_ms and utility of what task.json says; InvalidInputError names the field."""
    labels = _labels(said.get("labels"))
    return _name(said.get("name")), labels, _number(said, "latency_ms", above=0.0), _number(said, "utility")


def read_accuracy(folder: Path, gammas: Sequence[int]) -> dict[int, float]:
    """The profiled accuracy (0..1) of each of `gammas`. Raises InvalidInputError where one is missing."""
    known = read_object(folder / PROFILE_FILE).get("accuracy")
    found = {}
    for gamma in gammas:
        value = known.get(str(gamma)) if isinstance(known, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            wanted = "a number of 0 to 1 for every gamma of the model: `shapeshift tasks register` measures it"
            raise InvalidInputError(f"{PROFILE_FILE}: accuracy of gamma {gamma}", value, wanted)
        found[gamma] = float(value)
    return found


def sha256(folder: Path) -> str:
    """The hash over the task's files; InvalidInputError names a missing one."""
    digest = hashlib.sha256()
    for name in (TASK_FILE, PROMPTS_FILE, HEAD_FILE, PROFILE_FILE):
        if not (folder / name).is_file():
            raise InvalidInputError("task folder", str(folder), f"must hold {name}")
        digest.update(f"{name}:{file_sha256(folder / name)}\n".encode())
    return digest.hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; InvalidInputError names a file that holds none."""
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
    return value


def _labels(value: Any) -> tuple[str, ...]:
    good = isinstance(value, list) and 2 <= len(value) <= _MOST_LABELS and all(isinstance(one, str) for one in value)
    if not good or len(set(value)) < len(value):
        raise InvalidInputError(f"{TASK_FILE}: labels", value, f"2 to {_MOST_LABELS} different texts")
    return tuple(value)


def _number(said: Mapping[str, Any], name: str, above: float = -math.inf) -> float:
    value = said.get(name)
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
        raise InvalidInputError(file.name, str(file), f"safetensors of f32 or f16 ({error})") from None


def _checked(file: str, name: str, tensors: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
    value = tensors.get(name)
    if value is None or value.shape != shape or value.dtype not in (np.float32, np.float16):
        found = None if value is None else f"{value.dtype} {value.shape}"
        raise InvalidInputError(f"{file}: {name}", found, f"f32 or f16 of shape {shape}")
    if not np.isfinite(value).all():
        raise InvalidInputError(f"{file}: {name}", "NaN or infinity", "finite numbers")
    return value.astype(np.float32)


def _prompts(tensors: Mapping[str, Array], backbone: Backbone) -> dict[int, Array]:
    wanted = [gamma for gamma in backbone.gammas if gamma > 0]
    shapes = {gamma: (backbone.depth, gamma, backbone.width) for gamma in wanted}
    return {gamma: _checked(PROMPTS_FILE, str(gamma), tensors, shape) for gamma, shape in shapes.items()}


def _heads(tensors: Mapping[str, Array], labels: int, backbone: Backbone) -> dict[int, Head]:
    shape = (labels, backbone.features)
    heads = {}
    for gamma in {0, *backbone.gammas}:
        name = gamma if f"{gamma}.weight" in tensors else 0
        heads[gamma] = Head(
            _checked(HEAD_FILE, f"{name}.weight", tensors, shape),
            _checked(HEAD_FILE, f"{name}.bias", tensors, shape[:1]),
        )
    return heads
