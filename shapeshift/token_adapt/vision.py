"""The image model of a serving process: an engine for each gamma, and the tasks that a registry names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shapeshift.engines import manifest, registry
from shapeshift.engines.hardware import cores
from shapeshift.engines.protocol import Array, Engine
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt import folding, image_manifest, task_folder, task_registry
from shapeshift.token_adapt.folding import Folding
from shapeshift.token_adapt.image_manifest import ImageManifest
from shapeshift.token_adapt.interfaces import GammaProfile, Pixels, Probabilities, Task, TaskIndices
from shapeshift.token_adapt.task_folder import Backbone, Head, TaskParts
from shapeshift.token_adapt.task_registry import Entry


def open_model(folder: Path, tasks_dir: Path, threads: int, expect_sha256: str | None = None) -> VisionModel:
    """The engines in `folder`, each on `threads` threads (0: one a core), with no task before `reload_tasks`.

    Raises EngineError for a folder that is not as its manifest says.
    """
    made = image_manifest.load(folder, expect_sha256)
    manifest.check_files(folder, made.files)
    provider = registry.provider(made.provider)
    engines = {}
    for entry in made.engines:
        runtime = provider.open(folder / entry.folder, entry.precision, threads or cores())
        engines[entry.gamma] = runtime.engine(None, None)
    return VisionModel(made, engines, folding.load(folder, made.heads, made.epsilon), tasks_dir)


class VisionModel:
    """See `interfaces.ImageModel`. A task keeps its index and what is computed for it when it is unregistered, too."""

    def __init__(self, made: ImageManifest, engines: Mapping[int, Engine], folded: Folding, tasks_dir: Path) -> None:
        self.image_size = made.image_size
        self.gammas = tuple(sorted(engines))
        self.profiles = {
            entry.gamma: GammaProfile(
                entry.gamma,
                entry.tokens,
                {point.images: point.median_ms for point in entry.latency},
                entry.memory_mb,
            )
            for entry in made.engines
        }
        self.tasks: Mapping[str, Task] = {}
        self.backbone = Backbone(made.checkpoint_sha256, made.depth, made.width, made.features, self.gammas)
        self._engines = engines
        self._folding = folded
        self._tasks_dir = tasks_dir
        self._seen: tuple[int, ...] | None = None
        self._places: dict[str, int] = {}
        self._hashes: dict[str, str] = {}
        self._heads: list[Mapping[int, Head]] = []
        self._folded: list[Mapping[int, Array]] = []
        self._tables: dict[int, Array] = {}

    def features(self, gamma: int, pixels: Pixels, task_index: TaskIndices) -> Array:
        """What heads read, FP32 [n, features]; valid until the next call."""
        inputs: dict[str, Array] = {"PIXELS": pixels}
        if gamma > 0:
            inputs |= {"TASKS": task_index.astype(np.int64), "PROMPTS": self._tables[gamma]}
        return self._engines[gamma].run(inputs)["FEATURES"]

    def run(self, gamma: int, pixels: Pixels, task_index: TaskIndices) -> Sequence[Probabilities]:
        features = self.features(gamma, pixels, task_index)
        results: list[Probabilities] = [np.empty(0, np.float32)] * len(pixels)
        for place in np.unique(task_index):
            own = np.flatnonzero(task_index == place)
            for row, probabilities in zip(own, _probabilities(self._heads[place][gamma], features[own]), strict=True):
                results[row] = probabilities
        return results

    def reload_tasks(self) -> list[str]:
        """Takes in what the registry holds if it has changed; one message for each entry that was refused."""
        seen = self._look()
        if seen == self._seen:
            return []
        self._seen = seen
        try:
            entries = task_registry.read(self._tasks_dir)
        except InvalidInputError as error:
            return [f"{self._tasks_dir}: {error}"]
        refused = []
        tasks = {}
        for entry in entries:
            try:
                tasks[entry.name] = self._task(entry)
            except InvalidInputError as error:
                refused.append(f"task {entry.name}: {error}")
                if entry.name in self.tasks:
                    tasks[entry.name] = self.tasks[entry.name]
        self.tasks = tasks
        return refused

    def _look(self) -> tuple[int, ...]:
        """Changes whenever the registry is replaced."""
        try:
            found = (self._tasks_dir / task_registry.FILE_NAME).stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _task(self, entry: Entry) -> Task:
        """The task of an entry, read if it is new or has changed."""
        known = self.tasks.get(entry.name)
        if known is not None and self._hashes[entry.name] == entry.sha256:
            return known
        if task_folder.sha256(entry.folder) != entry.sha256:
            raise InvalidInputError("sha256", entry.sha256, "that of its files: register the task again")
        parts = task_folder.read_task(entry.folder, self.backbone)
        if parts.name != entry.name:
            raise InvalidInputError("name", parts.name, f"{entry.name}, as registered")
        accuracy = task_folder.read_accuracy(entry.folder, self.gammas)
        index = self.place(parts)
        self._hashes[entry.name] = entry.sha256
        return Task(parts.name, parts.labels, accuracy, parts.latency_ms, parts.utility, index)

    def place(self, parts: TaskParts) -> int:
        """Take a task's prompts and heads into use; its index from now on."""
        folded = {gamma: self._folding.fold(prompts) for gamma, prompts in parts.prompts.items()}
        index = self._places.setdefault(parts.name, len(self._heads))
        if index == len(self._heads):
            self._heads.append(parts.heads)
            self._folded.append(folded)
        else:
            self._heads[index], self._folded[index] = parts.heads, folded
        for gamma in folded:
            self._tables[gamma] = np.stack([own[gamma] for own in self._folded], axis=1)
        return index


def _probabilities(head: Head, features: Array) -> Array:
    """Softmax of a head's logits, FP32 [n, labels]."""
    logits = features @ head.weight.T + head.bias
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares
