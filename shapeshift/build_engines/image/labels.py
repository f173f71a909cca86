"""Verifying an engine that merges tokens by the labels that it gives.

Merging chooses tokens: the least rounding lets a near tie fall to another token, which moves the vector further than a
cosine allows and rarely changes a label.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shapeshift.engines.interfaces import Array
from shapeshift.engines.verify import VerificationError
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks import registry
from shapeshift.token_adapt.tasks.examples import Examples, from_file
from shapeshift.token_adapt.tasks.folder import Backbone, Head

# The least share of images with the label of the f32 model, and the most accuracy lost against it, of every task.
MIN_AGREEMENT = 0.99
MAX_LOSS = 0.005
_CHUNK = 64


@dataclass(frozen=True)
class LabelledTask:
    """A registered task, and the images that it was profiled on."""

    name: str
    head: Head
    examples: Examples


@dataclass(frozen=True)
class Agreement:
    """The least share of images with the reference's label over the tasks, and the most accuracy lost; 0 to 1.

    loss: below 0 if the engine is more often right than the reference.
    """

    share: float
    loss: float

    def require(self, engine: str) -> None:
        """Raise VerificationError naming `engine` unless both are within the limits."""
        if not (self.share >= MIN_AGREEMENT and self.loss <= MAX_LOSS):
            raise VerificationError(
                f"{engine} differs from the reference: {self.share:.2%} of the labels agree and {self.loss:.2%} of the "
                f"accuracy is lost; must be at least {MIN_AGREEMENT:.0%} and at most {MAX_LOSS:.1%}"
            )


def read_tasks(tasks_dir: Path, backbone: Backbone, gamma: int) -> list[LabelledTask]:
    """The registered tasks that fit `backbone` and keep images. Serving reports those that do not fit."""
    tasks = []
    for entry in registry.read(tasks_dir):
        try:
            parts = task_folder.read_task(entry.folder, backbone)
        except InvalidInputError:
            continue
        examples = from_file(entry.folder)
        if examples is not None:
            tasks.append(LabelledTask(parts.name, parts.heads[gamma], examples))
    return tasks


def compare(
    tasks: Sequence[LabelledTask], engine: Callable[[Array], Array], reference: Callable[[Array], Array]
) -> Agreement:
    """Agreement of the labels by two computations of features: pixels [n, size, size, 3] -> [n, features]."""
    shares, losses = [], []
    for task in tasks:
        ours, theirs = (_labels(task, features) for features in (engine, reference))
        right = task.examples.classes
        shares.append(float((ours == theirs).mean()))
        losses.append(float((theirs == right).mean() - (ours == right).mean()))
    return Agreement(min(shares), max(losses))


def _labels(task: LabelledTask, features: Callable[[Array], Array]) -> Array:
    chunks = np.array_split(np.arange(len(task.examples)), -(-len(task.examples) // _CHUNK))
    logits = [features(task.examples.pixels(chunk)) @ task.head.weight.T + task.head.bias for chunk in chunks]
    labels: Array = np.concatenate(logits).argmax(axis=1)
    return labels
