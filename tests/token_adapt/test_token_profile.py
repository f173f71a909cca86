"""What `shapeshift tasks register` measures of a task: accuracies over all images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.hardware import cpu_model
from shapeshift.token_adapt.model.manifest import Preprocessing
from shapeshift.token_adapt.tasks import examples, writing

GAMMAS = (-2, 0, 3)
SIZE = 4


class Model:
    """Takes the first pixel of an image for its class; at gamma 3 always class 1."""

    def __init__(self) -> None:
        self.gammas = GAMMAS
        self.preprocessing = Preprocessing(SIZE)
        self.calls: list[tuple[int, int]] = []

    def task(self, parts: Any, accuracy: Any) -> str:
        return "task"

    def run(self, gamma: int, pixels: np.ndarray, tasks: Sequence[str]) -> list[np.ndarray]:
        assert pixels.shape == (len(tasks), SIZE, SIZE, 3) and pixels.dtype == np.uint8
        assert set(tasks) == {"task"}
        self.calls.append((gamma, len(tasks)))
        classes = pixels[:, 0, 0, 0] if gamma != 3 else np.ones(len(tasks), int)
        return [np.eye(10)[int(one) % 10] for one in classes]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
def test_every_image_counts_once_in_the_accuracy(count: int) -> None:
    classes = np.arange(count) % 4
    shades = classes.copy()
    # One in three is mistaken.
    shades[::3] = 9
    pixels = np.broadcast_to(shades[:, None, None, None], (count, SIZE, SIZE, 3)).astype(np.uint8)
    model: Any = Model()
    task: Any = "task"
    said: list[str] = []
    found = writing.accuracies(model, task, examples.from_arrays(pixels, classes), said.append)
    right = count - len(range(0, count, 3))
    assert found == {-2: right / count, 0: right / count, 3: int((classes == 1).sum()) / count}
    assert all(images <= 64 for _, images in model.calls)
    assert sum(images for gamma, images in model.calls if gamma == 0) == count
    assert said == [f"accuracy at gamma {gamma} over {count} images" for gamma in GAMMAS]


def test_a_profile_says_what_was_measured_and_with_what() -> None:
    pixels, classes = np.ones((6, SIZE, SIZE, 3), np.uint8), np.array([1, 1, 1, 2, 2, 2])
    model: Any = Model()
    found = writing.profile(model, None, examples.from_arrays(pixels, classes), lambda step: None)  # type: ignore[arg-type]
    assert found.keys() == {"accuracy", "images", "hardware", "command"}
    assert (found["images"], found["hardware"]) == (6, cpu_model())
    assert found["accuracy"] == {str(gamma): 0.5 for gamma in GAMMAS}


def test_an_object_is_written_as_lines_that_end(tmp_path: Path) -> None:
    writing.write_object(tmp_path / "a.json", {"a": [1]})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"a": [1]} and text.endswith("}\n")
