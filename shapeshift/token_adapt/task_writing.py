"""Writing a task's folder, and measuring what its profile says (Register_Task)."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shapeshift.engines.hardware import cpu_model
from shapeshift.engines.protocol import Array
from shapeshift.token_adapt import task_folder
from shapeshift.token_adapt.examples import Examples
from shapeshift.token_adapt.image_manifest import BATCHES
from shapeshift.token_adapt.interfaces import Probabilities
from shapeshift.token_adapt.task_folder import TaskParts
from shapeshift.token_adapt.training import Progress, Trained
from shapeshift.token_adapt.vision import VisionModel

_CHUNK = 64
_ROUNDS = 3


def write_task(folder: Path, said: dict[str, Any], trained: Trained) -> None:
    """Write task.json (`said`), prompts and heads, these in f16, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = {str(gamma): _half(own.numpy()) for gamma, own in trained.prompts.items()}
    heads: dict[str, Array] = {}
    for gamma, (weight, bias) in trained.heads.items():
        heads |= {f"{gamma}.weight": _half(weight.numpy()), f"{gamma}.bias": _half(bias.numpy())}
    save_file(prompts, folder / task_folder.PROMPTS_FILE)
    save_file(heads, folder / task_folder.HEAD_FILE)
    write_object(folder / task_folder.TASK_FILE, said)


def write_object(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON object."""
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def profile(model: VisionModel, parts: TaskParts, held: Examples, progress: Progress) -> dict[str, Any]:
    """What profile.json says: accuracy and latency by gamma, and how they were measured."""
    index = model.place(parts)
    return {
        "accuracy": {str(gamma): share for gamma, share in accuracies(model, index, held, progress).items()},
        "latency_ms": {str(gamma): own for gamma, own in latencies(model, index, progress).items()},
        "images": len(held),
        "hardware": cpu_model(),
        "command": "shapeshift tasks register",
    }


def accuracies(model: VisionModel, index: int, examples: Examples, progress: Progress) -> dict[int, float]:
    """Share of `examples` whose label comes first, by gamma, of the task at `index`, through the engines."""
    found = {}
    chunks = np.array_split(np.arange(len(examples)), -(-len(examples) // _CHUNK))
    for gamma in model.gammas:
        progress(f"accuracy at gamma {gamma} over {len(examples)} images")
        right = 0
        for chunk in chunks:
            shares = model.run(gamma, examples.pixels(chunk), np.full(len(chunk), index, np.int32))
            right += sum(int(own.argmax()) == label for own, label in zip(shares, examples.classes[chunk], strict=True))
        found[gamma] = right / len(examples)
    return found


def latencies(model: VisionModel, index: int, progress: Progress) -> dict[int, dict[int, float]]:
    """Median milliseconds by gamma and batch size; every round runs each of them once, in a new order."""
    size, noise = model.image_size, np.random.default_rng(0)
    calls: list[tuple[int, int, Callable[[], Sequence[Probabilities]]]] = []
    for gamma in model.gammas:
        for images in BATCHES:
            pixels = noise.integers(0, 256, (images, size, size, 3), dtype=np.uint8)
            calls.append((gamma, images, partial(model.run, gamma, pixels, np.full(images, index, np.int32))))
    samples: dict[tuple[int, int], list[float]] = {(gamma, images): [] for gamma, images, _ in calls}
    shuffler = random.Random(0)
    for number in range(_ROUNDS + 1):
        progress(f"latency, round {number} of {_ROUNDS}" if number else "latency, warm-up")
        shuffler.shuffle(calls)
        for gamma, images, call in calls:
            before = time.perf_counter()
            call()
            if number:
                samples[gamma, images].append((time.perf_counter() - before) * 1e3)
    return {
        gamma: {images: round(float(np.median(samples[gamma, images])), 3) for images in BATCHES}
        for gamma in model.gammas
    }


def _half(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float16)
