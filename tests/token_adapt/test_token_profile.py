"""What `shapeshift tasks register` measures of a task: accuracies over all images, and medians by a clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.token_adapt.interfaces import Preprocessing
from shapeshift.token_adapt.model.manifest import BATCHES
from shapeshift.token_adapt.tasks import examples, writing

GAMMAS = (-2, 0, 3)
SIZE = 4


class Clock:
    """Stands for the module `time`. Seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Model:
    """Takes the first pixel of an image for its class; at gamma 3 always class 1. A call takes the time it is told."""

    def __init__(self, clock: Clock, times_s: Sequence[float] = (0.0,)) -> None:
        self.gammas = GAMMAS
        self.profiles = {gamma: SimpleNamespace(latency_ms=dict.fromkeys(BATCHES, 1.0)) for gamma in GAMMAS}
        self.preprocessing = Preprocessing(SIZE)
        self.calls: list[tuple[int, int]] = []
        self._clock, self._times_s = clock, times_s
        self._counts: dict[tuple[int, int], int] = {}

    def task(self, parts: Any, accuracy: Any) -> str:
        return "task"

    def run(self, gamma: int, pixels: np.ndarray, tasks: Sequence[str]) -> list[np.ndarray]:
        assert pixels.shape == (len(tasks), SIZE, SIZE, 3) and pixels.dtype == np.uint8
        assert set(tasks) == {"task"}
        key = (gamma, len(tasks))
        self.calls.append(key)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        factor = 1 + (GAMMAS.index(gamma) * len(BATCHES) + BATCHES.index(len(tasks)) if len(tasks) in BATCHES else 0)
        self._clock.now += self._times_s[min(count, len(self._times_s)) - 1] * factor
        found = pixels[:, 0, 0, 0] if gamma != 3 else np.ones(len(tasks), int)
        return [np.eye(10)[int(one) % 10] for one in found]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(writing, "time", found)
    return found


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
def test_every_image_counts_once_in_the_accuracy(clock: Clock, count: int) -> None:
    classes = np.arange(count) % 4
    shades = classes.copy()
    # One in three is mistaken.
    shades[::3] = 9
    pixels = np.broadcast_to(shades[:, None, None, None], (count, SIZE, SIZE, 3)).astype(np.uint8)
    model: Any = Model(clock)
    task: Any = "task"
    said: list[str] = []
    found = writing.accuracies(model, task, examples.from_arrays(pixels, classes), said.append)
    right = count - len(range(0, count, 3))
    assert found == {-2: right / count, 0: right / count, 3: int((classes == 1).sum()) / count}
    assert all(images <= 64 for _, images in model.calls)
    assert sum(images for gamma, images in model.calls if gamma == 0) == count
    assert said == [f"accuracy at gamma {gamma} over {count} images" for gamma in GAMMAS]


def test_latencies_are_medians_in_milliseconds_without_the_first_call(clock: Clock) -> None:
    model: Any = Model(clock, (9.0, 0.003, 0.001, 0.0020004))
    task: Any = "task"
    said: list[str] = []
    found = writing.latencies(model, task, said.append)
    factors = {(gamma, images): 1 + number for number, (gamma, images) in enumerate(_pairs())}
    assert found == {gamma: {images: _ms(factors[gamma, images]) for images in BATCHES} for gamma in GAMMAS}
    assert sorted(model.calls) == sorted(4 * _pairs())
    assert said == ["latency, warm-up", *(f"latency, round {number} of 3" for number in (1, 2, 3))]


def test_a_batch_size_that_the_engines_are_not_profiled_at_is_left_out(clock: Clock) -> None:
    model: Any = Model(clock)
    model.profiles[3].latency_ms = {1: 20.0, 4: 80.0}
    task: Any = "task"
    found = writing.latencies(model, task, lambda step: None)
    assert [*found[0]] == [*BATCHES] and [*found[3]] == [1, 4]


def _pairs() -> list[tuple[int, int]]:
    return [(gamma, images) for gamma in GAMMAS for images in BATCHES]


def _ms(factor: int) -> float:
    return round(2.0004 * factor, 3)


def test_a_profile_says_what_was_measured_and_with_what(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "cpu_model", lambda: "a processor")
    pixels, classes = np.ones((6, SIZE, SIZE, 3), np.uint8), np.array([1, 1, 1, 2, 2, 2])
    model: Any = Model(clock, (0.001,))
    found = writing.profile(model, None, examples.from_arrays(pixels, classes), lambda step: None)  # type: ignore[arg-type]
    assert found.keys() == {"accuracy", "latency_ms", "images", "hardware", "command"}
    assert (found["images"], found["hardware"]) == (6, "a processor")
    assert found["accuracy"] == {str(gamma): 0.5 for gamma in GAMMAS}
    assert found["latency_ms"].keys() == {str(gamma) for gamma in GAMMAS}


def test_an_object_is_written_as_lines_that_end(tmp_path: Path) -> None:
    writing.write_object(tmp_path / "a.json", {"a": [1]})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"a": [1]} and text.endswith("}\n")
