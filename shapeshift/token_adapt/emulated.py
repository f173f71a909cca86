"""An image model that waits for measured latencies without using the CPU, in the place of a real one.

With it the real server can be tried with models and devices that are not there. Whatever is measured so must be
labelled "emulated".
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.interfaces import GammaProfile, Pixels, Probabilities, Task, TaskIndices


class EmulatedImageModel:
    """Waits as long as a batch takes by the profile; the first label is as likely as the task is accurate.

    switch_ms: by gamma, what the first batch takes longer after another gamma (a model that is loaded first).
    """

    def __init__(
        self,
        image_size: int,
        profiles: Mapping[int, GammaProfile],
        tasks: Mapping[str, Task],
        switch_ms: Mapping[int, float] | None = None,
    ) -> None:
        self.image_size = image_size
        self.gammas = tuple(sorted(profiles))
        self.profiles = dict(profiles)
        self.tasks = dict(tasks)
        self._by_index = {task.index: task for task in tasks.values()}
        self._switch_ms = dict(switch_ms or {})
        self._last: int | None = None

    def run(self, gamma: int, pixels: Pixels, task_index: TaskIndices) -> Sequence[Probabilities]:
        """See `interfaces.ImageModel`."""
        points = sorted(self.profiles[gamma].latency_ms.items())
        counts, latencies = zip(*points, strict=True)
        wait_ms = float(np.interp(len(pixels), counts, latencies)) * max(1.0, len(pixels) / counts[-1])
        if self._last not in (None, gamma):
            wait_ms += self._switch_ms.get(gamma, 0.0)
        self._last = gamma
        time.sleep(wait_ms / 1e3)
        return [_answer(self._by_index[index], gamma) for index in task_index.tolist()]

    def reload_tasks(self) -> list[str]:
        """Nothing changes."""
        return []


def _answer(task: Task, gamma: int) -> Probabilities:
    first = task.accuracy.get(gamma, 0.0)
    found = np.full(len(task.labels), (1.0 - first) / max(1, len(task.labels) - 1), np.float32)
    found[0] = first
    return found


def write(
    file: Path,
    image_size: int,
    profiles: Sequence[GammaProfile],
    tasks: Sequence[Task],
    switch_ms: Mapping[int, float] | None = None,
) -> None:
    """Describe an emulated model in a file that `read` takes."""
    held = {
        "image_size": image_size,
        "profiles": [
            {
                "gamma": one.gamma,
                "tokens": one.tokens,
                "latency_ms": {str(count): ms for count, ms in one.latency_ms.items()},
                "memory_mb": one.memory_mb,
            }
            for one in profiles
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
    file.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


def read(file: Path, time_scale: float = 1.0) -> EmulatedImageModel:
    """The model that a file describes, its latencies `time_scale` times as long.

    Raises InvalidInputError for a file that cannot be read or that describes none.
    """
    if not (math.isfinite(time_scale) and time_scale > 0):
        raise InvalidInputError("time_scale", time_scale, "above 0")
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        profiles = {int(one["gamma"]): _profile(one, time_scale) for one in held["profiles"]}
        tasks = {str(one["name"]): _task(index, one) for index, one in enumerate(held["tasks"])}
        switch_ms = {int(gamma): ms * time_scale for gamma, ms in held.get("switch_ms", {}).items()}
        size = int(held["image_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InvalidInputError("profile_file", str(file), f"JSON of image_size, profiles and tasks ({what})") from None
    if not profiles or not tasks or size < 1:
        raise InvalidInputError("profile_file", str(file), "at least one profile, one task and an image size of 1")
    return EmulatedImageModel(size, profiles, tasks, switch_ms)


def _profile(one: Mapping[str, Any], time_scale: float) -> GammaProfile:
    latencies = {int(count): float(ms) * time_scale for count, ms in one["latency_ms"].items()}
    return GammaProfile(int(one["gamma"]), int(one["tokens"]), latencies, float(one["memory_mb"]))


def _task(index: int, one: Mapping[str, Any]) -> Task:
    accuracy = {int(gamma): float(share) for gamma, share in one["accuracy"].items()}
    return Task(one["name"], tuple(one["labels"]), accuracy, float(one["latency_ms"]), float(one["utility"]), index)
