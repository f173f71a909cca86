"""The image model of a serving process: one engine per gamma, and the registered tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from shapeshift.engines.hardware import cores
from shapeshift.engines.interfaces import PROVIDERS, Array, Engine, Runtime
from shapeshift.engines.manifest import check_files, hashes_file
from shapeshift.errors import InvalidInputError
from shapeshift.registry import FILE, FolderWatch
from shapeshift.token_adapt.model import manifest as image_manifest
from shapeshift.token_adapt.policy.costs import GammaProfile
from shapeshift.token_adapt.request import EMBEDDING, Pixels, Task, Values
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks import registry as task_registry
from shapeshift.token_adapt.tasks.folder import Backbone, Head, TaskParts
from shapeshift.token_adapt.tasks.registry import TaskEntry

# Of requests for vectors that state none: whoever fills an index can wait, and wants those of gamma 0.
_VECTOR_LATENCY_MS, _VECTOR_UTILITY = 60_000.0, 0.5
# Of the own classifier's accuracy, if all patches were merged.
_ASSUMED_LOSS = 0.1
FOLDING_FILE = "folding.safetensors"


def open_model(
    folder: Path, tasks_dir: Path, threads: int, expect_sha256: str | None = None, device: int | None = None
) -> VisionModel:
    """The engines in `folder`, each on `threads` threads (0: one per core), or on the GPU `device`.

    It has no tasks before `reload_tasks`.

    Raises EngineError if the folder does not match its manifest.
    """
    manifest = image_manifest.load(folder, expect_sha256)
    check_files(folder, manifest.files, hashes_file(folder))
    provider = PROVIDERS[manifest.provider]
    engines: dict[int, Engine] = {}
    first: Runtime | None = None
    for entry in manifest.engines:
        # The gammas of a model have one set of weights.
        runtime = provider.open(folder / entry.folder, entry.precision, threads or cores(), device, beside=first)
        engines[entry.gamma] = runtime.engine(None, None)
        first = first or runtime
    model = VisionModel(manifest, engines, PromptFolding.load(folder, manifest.heads, manifest.epsilon), tasks_dir)
    model.add_embedding({entry.gamma: entry.cosine for entry in manifest.engines if entry.gamma <= 0})
    if manifest.labels:
        model.add_classifier(task_folder.read_classifier(folder, manifest.labels, model.backbone))
    return model


@dataclass(frozen=True)
class PromptFolding:
    """`UnifiedViT.fold` without torch: prompts to the keys and values that engines take.

    It has the first norm and the key and value projections of all blocks, in a file beside the engines.

    norm_weight, norm_bias [depth, width]; weight [depth, 2 width, width]; bias [depth, 2 width];
    key_weight, key_bias [depth, head width]: the norm of the keys, or None.
    """

    norm_weight: Array
    norm_bias: Array
    weight: Array
    bias: Array
    heads: int
    epsilon: float
    key_weight: Array | None = None
    key_bias: Array | None = None

    def fold(self, prompts: Array) -> Array:
        """Prompts [depth, g, width] -> keys and values, FP32 [depth, 2, heads, g, head width]."""
        depth, count, width = prompts.shape
        normal = _layer_norm(prompts.astype(np.float32), self.norm_weight, self.norm_bias, self.epsilon)
        keys_values = normal @ self.weight.transpose(0, 2, 1) + self.bias[:, None]
        split = keys_values.reshape(depth, count, 2, self.heads, width // self.heads).transpose(0, 2, 3, 1, 4).copy()
        if self.key_weight is not None and self.key_bias is not None:
            keys = split[:, 0].reshape(depth, -1, width // self.heads)
            keys = _layer_norm(keys, self.key_weight, self.key_bias, self.epsilon)
            split[:, 0] = keys.reshape(split[:, 0].shape)
        return np.ascontiguousarray(split, np.float32)

    def save(self, folder: Path) -> None:
        """Write the weights into `folder`."""
        weights = {
            "norm_weight": self.norm_weight,
            "norm_bias": self.norm_bias,
            "weight": self.weight,
            "bias": self.bias,
        }
        if self.key_weight is not None and self.key_bias is not None:
            weights |= {"key_weight": self.key_weight, "key_bias": self.key_bias}
        save_file(
            {name: np.ascontiguousarray(value, np.float32) for name, value in weights.items()}, folder / FOLDING_FILE
        )

    @classmethod
    def load(cls, folder: Path, heads: int, epsilon: float) -> PromptFolding:
        """Read what `save` wrote."""
        return cls(**load_file(folder / FOLDING_FILE), heads=heads, epsilon=epsilon)


@dataclass(frozen=True)
class _Computed:
    """What a task is computed with, by gamma: its heads, none for vectors, and its prompts as engines take them."""

    heads: Mapping[int, Head]
    prompts: Mapping[int, Array]


class VisionModel:
    """See `executor.ImageModel`. It holds the current version of each task; others live as long as their requests."""

    def __init__(
        self,
        manifest: image_manifest.ImageManifest,
        engines: Mapping[int, Engine],
        folding: PromptFolding,
        tasks_dir: Path,
    ) -> None:
        self.preprocessing = manifest.preprocessing
        self.gammas = tuple(sorted(engines))
        self.profiles: Mapping[int, GammaProfile] = {
            entry.gamma: GammaProfile(
                entry.gamma,
                entry.tokens,
                {point.images: point.best_ms for point in entry.latency},
                entry.memory_mb,
            )
            for entry in manifest.engines
        }
        self.tasks: Mapping[str, Task] = {}
        self._own_tasks: Mapping[str, Task] = {}
        self.backbone = Backbone(
            manifest.checkpoint_sha256, manifest.depth, manifest.width, manifest.features, self.gammas
        )
        self._engines = engines
        self._folding = folding
        self._tasks_dir = tasks_dir
        self._watch = FolderWatch(tasks_dir / FILE)

    def run(self, gamma: int, pixels: Pixels, tasks: Sequence[Task]) -> Sequence[Values]:
        """See `executor.ImageModel`."""
        versions: dict[int, _Computed] = {id(task): task.parts for task in tasks}
        numbers = {identity: number for number, identity in enumerate(versions)}
        rows_of = np.array([numbers[id(task)] for task in tasks], np.int64)
        inputs: dict[str, Array] = {"PIXELS": pixels}
        if gamma > 0:
            prompts = np.stack([version.prompts[gamma] for version in versions.values()], axis=1)
            inputs |= {"TASKS": rows_of, "PROMPTS": prompts}
        features = self._engines[gamma].run(inputs)["FEATURES"]
        results: list[Values] = [np.empty(0, np.float32)] * len(pixels)
        for number, version in enumerate(versions.values()):
            rows = np.flatnonzero(rows_of == number)
            of_task = features[rows]
            computed = _probabilities(version.heads[gamma], of_task) if version.heads else _of_length_1(of_task)
            for row, values in zip(rows, computed, strict=True):
                results[row] = values
        return results

    def reload_tasks(self) -> list[str]:
        """Read the registry if it has changed; returns one message per refused entry."""
        if not self._watch.has_changed():
            return []
        try:
            entries = task_registry.read(self._tasks_dir)
        except InvalidInputError as error:
            return [f"{self._tasks_dir}: {error}"]
        refused = []
        tasks = dict(self._own_tasks)
        for entry in entries:
            try:
                tasks[entry.name] = self._task(entry)
            except InvalidInputError as error:
                refused.append(f"task {entry.name}: {error}")
                if entry.name in self.tasks:
                    tasks[entry.name] = self.tasks[entry.name]
        self.tasks = tasks
        return refused

    def _task(self, entry: TaskEntry) -> Task:
        """The task of an entry; its files are read if the entry is new or has changed."""
        current = self.tasks.get(entry.name)
        if current is not None and current.sha256 == entry.sha256:
            return current
        if task_folder.sha256(entry.folder) != entry.sha256:
            raise InvalidInputError("sha256", entry.sha256, "the hash of its files; register the task again")
        parts = task_folder.read_task(entry.folder, self.backbone)
        if parts.name != entry.name:
            raise InvalidInputError("name", parts.name, f"{entry.name}, as in the registry")
        accuracy = task_folder.read_accuracy(entry.folder, self.gammas)
        return self.task(parts, accuracy, sha256=entry.sha256)

    def add_classifier(self, parts: TaskParts) -> None:
        """Serve the checkpoint's own classifier, by default. A registered task of its name takes its place.

        Its accuracy is not measured: it is assumed to be 1, less a little for each patch that is merged, so that
        patches are merged only where time is short. It has no prompts, and so no gamma above 0.
        """
        most = self.profiles[0].tokens
        accuracy = {
            gamma: 1.0 - _ASSUMED_LOSS * (1 - profile.tokens / most)
            for gamma, profile in self.profiles.items()
            if gamma <= 0
        }
        self._add(self.task(parts, accuracy, is_default=True))

    def add_embedding(self, cosines: Mapping[int, float]) -> None:
        """Serve vectors, whose accuracy is their cosine to those of gamma 0. They have no prompts."""
        computed, defaults = _Computed({}, {}), (_VECTOR_LATENCY_MS, _VECTOR_UTILITY)
        size = self.backbone.features
        self._add(Task(EMBEDDING, (), dict(cosines), *defaults, parts=computed, embedding_size=size))

    def _add(self, task: Task) -> None:
        self._own_tasks = {**self._own_tasks, task.name: task}
        self.tasks = self._own_tasks

    def task(
        self, parts: TaskParts, accuracy: Mapping[int, float], *, is_default: bool = False, sha256: str = ""
    ) -> Task:
        """A version of a task that `run` computes; it is not in `tasks`."""
        folded = {gamma: self._folding.fold(prompts) for gamma, prompts in parts.prompts.items()}
        computed = _Computed(parts.heads, folded)
        defaults = parts.latency_ms, parts.utility
        return Task(parts.name, parts.labels, accuracy, *defaults, is_default, sha256, computed)


def _probabilities(head: Head, features: Array) -> Array:
    """Softmax of a head's logits, FP32 [n, labels]."""
    logits = features @ head.weight.T + head.bias
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax: Array = (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)
    return softmax


def _of_length_1(vectors: Array) -> Array:
    """The vectors [n, width] divided by their lengths."""
    scaled: Array = (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return scaled


def _layer_norm(x: Array, weight: Array, bias: Array, epsilon: float) -> Array:
    """Over the last axis of [depth, n, width]."""
    centred = x - x.mean(2, keepdims=True)
    scale = np.sqrt(np.square(centred).mean(2, keepdims=True) + epsilon)
    normal: Array = centred / scale * weight[:, None] + bias[:, None]
    return normal
