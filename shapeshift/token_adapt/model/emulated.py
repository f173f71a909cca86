"""An image model that computes nothing and sleeps for profiled latencies.

It runs the real server with models and devices that are unavailable. Results measured with it must be labelled
"emulated".
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.model.manifest import Preprocessing
from shapeshift.token_adapt.policy.costs import GammaProfile
from shapeshift.token_adapt.request import Pixels, Task, Values


class EmulatedImageModel:
    """Sleeps for the profiled latency of a batch; the first label gets the task's accuracy as its probability.

    switch_ms: by gamma, added to the latency of a batch that follows another gamma (loading another model).
    """

    def __init__(
        self,
        image_size: int,
        profiles: Mapping[int, GammaProfile],
        tasks: Mapping[str, Task],
        switch_ms: Mapping[int, float] | None = None,
    ) -> None:
        self.preprocessing = Preprocessing(image_size)
        self.gammas = tuple(sorted(profiles))
        self.profiles = profiles
        self.tasks = tasks
        self._switch_ms = dict(switch_ms or {})
        self._last_gamma: int | None = None

    def run(self, gamma: int, pixels: Pixels, tasks: Sequence[Task]) -> Sequence[Values]:
        """See `executor.ImageModel`."""
        points = sorted(self.profiles[gamma].latency_ms.items())
        counts, latencies = zip(*points, strict=True)
        sleep_ms = float(np.interp(len(pixels), counts, latencies)) * max(1.0, len(pixels) / counts[-1])
        if self._last_gamma not in (None, gamma):
            sleep_ms += self._switch_ms.get(gamma, 0.0)
        self._last_gamma = gamma
        time.sleep(sleep_ms / 1e3)
        return [_probabilities(task, gamma) for task in tasks]

    def reload_tasks(self) -> list[str]:
        """The tasks never change."""
        return []


def _probabilities(task: Task, gamma: int) -> Values:
    accuracy = task.accuracy.get(gamma, 0.0)
    probabilities = np.full(len(task.labels), (1.0 - accuracy) / max(1, len(task.labels) - 1), np.float32)
    probabilities[0] = accuracy
    return probabilities


def write(
    file: Path,
    image_size: int,
    profiles: Sequence[GammaProfile],
    tasks: Sequence[Task],
    switch_ms: Mapping[int, float] | None = None,
) -> None:
    """Write the description of an emulated model."""
    description = {
        "image_size": image_size,
        "profiles": [
            {
                "gamma": profile.gamma,
                "tokens": profile.tokens,
                "latency_ms": {str(count): ms for count, ms in profile.latency_ms.items()},
                "memory_mb": profile.memory_mb,
            }
            for profile in profiles
        ],
        "tasks": [
            {
                "name": task.name,
                "labels": list(task.labels),
                "accuracy": {str(gamma): share for gamma, share in task.accuracy.items()},
                "latency_ms": task.latency_ms,
                "utility": task.utility,
            }
            for task in tasks
        ],
        "switch_ms": {str(gamma): ms for gamma, ms in (switch_ms or {}).items()},
    }
    file.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> EmulatedImageModel:
    """The model that a file describes. Raises InvalidInputError for an unreadable or invalid file."""
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
        profiles = {int(entry["gamma"]): _profile(entry) for entry in description["profiles"]}
        tasks = {str(entry["name"]): _task(entry) for entry in description["tasks"]}
        switch_ms = {int(gamma): ms for gamma, ms in description.get("switch_ms", {}).items()}
        size = int(description["image_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise InvalidInputError(
            "profile_file", str(file), f"JSON with image_size, profiles and tasks ({cause})"
        ) from None
    if not profiles or not tasks or size < 1:
        raise InvalidInputError(
            "profile_file", str(file), "at least one profile, one task, and an image_size of at least 1"
        )
    return EmulatedImageModel(size, profiles, tasks, switch_ms)


def _profile(entry: Mapping[str, Any]) -> GammaProfile:
    latencies = {int(count): float(ms) for count, ms in entry["latency_ms"].items()}
    return GammaProfile(int(entry["gamma"]), int(entry["tokens"]), latencies, float(entry["memory_mb"]))


def _task(entry: Mapping[str, Any]) -> Task:
    accuracy = {int(gamma): float(share) for gamma, share in entry["accuracy"].items()}
    labels = tuple(entry["labels"])
    return Task(entry["name"], labels, accuracy, float(entry["latency_ms"]), float(entry["utility"]))
