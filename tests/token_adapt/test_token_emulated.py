"""The emulated model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.model import emulated
from tests.token_adapt.token_models import PROFILES, TASKS


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps of the model, ms."""
    slept: list[float] = []
    monkeypatch.setattr(emulated.time, "sleep", lambda seconds: slept.append(round(seconds * 1e3, 6)))
    return slept


def run(model: emulated.EmulatedImageModel, gamma: int, *tasks: str) -> list[np.ndarray]:
    return list(model.run(gamma, np.zeros((len(tasks), 8, 8, 3), np.uint8), [TASKS[name] for name in tasks]))


def test_it_sleeps_for_the_profiled_latency(tmp_path: Path, sleeps: list[float]) -> None:
    file = tmp_path / "model.json"
    emulated.write(file, 8, list(PROFILES.values()), list(TASKS.values()), {2: 30.0})
    model = emulated.read(file)
    assert model.gammas == (-4, 0, 2) and model.preprocessing.size == 8
    assert model.tasks == TASKS
    for gamma, count in ((0, 1), (0, 64), (2, 1), (2, 1), (0, 1), (0, 128)):
        run(model, gamma, *["animals"] * count)
    assert sleeps == pytest.approx([1.0, 7.4, 1.5 + 30.0, 1.5, 1.0, 14.8])


def test_the_accuracy_is_the_probability_of_the_first_label(sleeps: list[float]) -> None:
    model = emulated.EmulatedImageModel(8, PROFILES, TASKS)
    animals, digits = run(model, 0, "animals", "digits")
    assert animals == pytest.approx([0.8, 0.2])
    assert digits[0] == pytest.approx(0.95) and digits.sum() == pytest.approx(1.0) and len(digits) == 10
    assert model.reload_tasks() == []


@pytest.mark.parametrize("text", ["", "{}", '{"image_size": 8, "profiles": [], "tasks": []}', '{"profiles": 3}'])
def test_an_invalid_description_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(InvalidInputError, match="profile_file"):
        emulated.read(tmp_path / "model.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="profile_file"):
        emulated.read(tmp_path / "none.json")
