"""The image model of a serving process on engines that are fakes: which rows go where, and what a task's head says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.hardware import cores
from shapeshift.engines.manifest import list_files
from shapeshift.errors import EngineError
from shapeshift.settings import Choices
from shapeshift.token_adapt.model import vision_model
from shapeshift.token_adapt.model.manifest import BatchLatency, GammaEntry, ImageManifest, Preprocessing
from shapeshift.token_adapt.model.vision_model import FOLDING_FILE as FOLDING
from shapeshift.token_adapt.model.vision_model import PromptFolding, VisionModel
from shapeshift.token_adapt.request import Task
from shapeshift.token_adapt.tasks.folder import Head, TaskParts

GAMMAS = (-4, 0, 2)
TOKENS = {-4: 12, 0: 16, 2: 18}


class FakeEngine:
    """Its features of an image are the first pixel and the gamma. calls: the inputs of each."""

    def __init__(self, gamma: int) -> None:
        self.calls: list[Mapping[str, Any]] = []
        self._gamma = gamma

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(inputs)
        first = inputs["PIXELS"][:, 0].astype(np.float32)
        return {"FEATURES": np.stack([first, np.full_like(first, self._gamma)], axis=1)}


class Doubling:
    """Stands for the folding of prompts."""

    def fold(self, prompts: Any) -> Any:
        return 2 * prompts


Made = tuple[VisionModel, dict[int, FakeEngine]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    engines = {gamma: FakeEngine(gamma) for gamma in (2, -4, 0)}
    entries = [
        SimpleNamespace(
            gamma=gamma,
            tokens=TOKENS[gamma],
            memory_mb=1.5,
            latency=[SimpleNamespace(images=1, median_ms=3.0, p99_ms=9.0, best_ms=2.0)],
        )
        for gamma in GAMMAS
    ]
    manifest: Any = SimpleNamespace(
        preprocessing=None, engines=entries, checkpoint_sha256="c", depth=1, width=2, features=2
    )
    return VisionModel(manifest, engines, Doubling(), tmp_path), engines  # type: ignore[arg-type]


class Provider:
    """opened: the folder, precision, threads and device of each engine, and the one that it was opened beside."""

    def __init__(self) -> None:
        self.opened: list[tuple[Any, ...]] = []

    def open(self, folder: Path, precision: str, threads: int, device: int | None, beside: Any) -> Any:
        self.opened.append((folder.name, precision, threads, device, beside))
        return SimpleNamespace(number=len(self.opened), engine=lambda tokens, rows: FakeEngine(0))


PROVIDER = Provider()


def write_engines(folder: Path) -> None:
    """A folder of engines of provider `fake`, of one block of width 2."""
    entries = tuple(
        GammaEntry(gamma, f"g{gamma}", precision, 1, 1.0, 0.0, 1.0, None, 1.0, (BatchLatency(1, 3.0, 9.0, 2.0),))
        for gamma, precision in ((-4, "f32"), (0, "bf16"), (2, "bf16"))
    )
    norm, projection = np.zeros((1, 2), np.float32), np.zeros((1, 4, 2), np.float32)
    PromptFolding(norm, norm, projection, np.zeros((1, 4), np.float32), 1, 1e-6).save(folder)
    texts: Any = dict.fromkeys(("build_key", "provider_version", "reference", "tolerance", "hardware"), "")
    sizes: Any = {"threads": 1, "width": 2, "depth": 1, "heads": 1, "epsilon": 1e-6, "features": 2}
    ImageManifest(
        model="m",
        family="f",
        checkpoint_sha256="c",
        provider="fake",
        precision="bf16",
        preprocessing=Preprocessing(2),
        labels=(),
        files=list_files(folder),
        engines=entries,
        **texts,
        **sizes,
    ).save(folder)


@pytest.mark.parametrize("threads", [0, 3])
def test_engines_share_weights_and_have_the_threads_that_are_stated_or_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    write_engines(tmp_path)
    provider = Provider()
    monkeypatch.setitem(globals(), "PROVIDER", provider)
    monkeypatch.setattr(vision_model, "PROVIDERS", Choices("provider", {"fake": f"{__name__}:PROVIDER"}))
    model = vision_model.open_model(tmp_path, tmp_path, threads, device=7)
    each = threads or cores()
    assert [one[:4] for one in provider.opened] == [
        ("g-4", "f32", each, 7),
        ("g0", "bf16", each, 7),
        ("g2", "bf16", each, 7),
    ]
    beside = [one[4] for one in provider.opened]
    assert beside[0] is None and [one.number for one in beside[1:]] == [1, 1]
    assert model.gammas == GAMMAS and list(model.tasks) == ["embedding"]
    (tmp_path / FOLDING).write_bytes(b"")
    with pytest.raises(EngineError, match="0 bytes"):
        vision_model.open_model(tmp_path, tmp_path, threads)


def parts(name: str, sign: float, prompts: bool) -> TaskParts:
    """A task whose heads tell by the first pixel, with the sign, and by gamma in their bias."""
    heads = {
        gamma: Head(np.array([[sign, 0], [0, 0]], np.float32), np.array([0, gamma], np.float32)) for gamma in GAMMAS
    }
    own = {2: np.full((1, 2, 1, 2, 2), sign, np.float32)} if prompts else {}
    return TaskParts(name, ("yes", "no"), 100.0, 1.0, own, heads)


def pixels(*first: int) -> Any:
    return np.array([[one, 0] for one in first], np.uint8)


def expected(first: float, sign: float, gamma: int) -> Any:
    logits = np.array([sign * first, gamma])
    return np.exp(logits) / np.exp(logits).sum()


def test_gammas_ascend_and_a_profile_has_the_best_times(made: Made) -> None:
    model, _ = made
    assert model.gammas == GAMMAS
    assert {gamma: one.latency_ms for gamma, one in model.profiles.items()} == dict.fromkeys(GAMMAS, {1: 2.0})
    assert (model.profiles[2].tokens, model.profiles[2].memory_mb) == (18, 1.5)


def task(model: VisionModel, name: str, sign: float, prompts: bool = True) -> Task:
    return model.task(parts(name, sign, prompts), {})


@pytest.mark.parametrize("gamma", GAMMAS)
def test_each_row_gets_the_softmax_of_the_head_of_its_task(made: Made, gamma: int) -> None:
    model, engines = made
    first, second = task(model, "a", 1.0), task(model, "b", -1.0)
    found = model.run(gamma, pixels(1, 2, 3), [second, first, second])
    for own, shade, sign in zip(found, (1, 2, 3), (-1.0, 1.0, -1.0), strict=True):
        np.testing.assert_allclose(own, expected(shade, sign, gamma), rtol=1e-6)
        assert own.dtype == np.float32
    assert [len(engine.calls) for engine in (engines[one] for one in GAMMAS)] == [one == gamma for one in GAMMAS]


def test_at_0_and_below_tasks_with_and_without_prompts_share_a_call(made: Made) -> None:
    model, engines = made
    tasks = [task(model, "a", 1.0), task(model, "b", -1.0, prompts=False)]
    for gamma in (0, -4):
        model.run(gamma, pixels(1, 2), tasks)
        (call,) = engines[gamma].calls
        assert list(call) == ["PIXELS"] and len(call["PIXELS"]) == 2


def test_prompts_of_the_tasks_of_a_batch_lie_side_by_side(made: Made) -> None:
    model, engines = made
    a, _, c = (task(model, name, sign) for name, sign in (("a", 1.0), ("b", -1.0), ("c", 3.0)))
    model.run(2, pixels(1, 2, 3), [c, a, c])
    (call,) = engines[2].calls
    assert call["PROMPTS"].shape == (1, 2, 2, 1, 2, 2) and call["TASKS"].dtype == np.int64
    assert call["TASKS"].tolist() == [0, 1, 0]
    assert [np.unique(call["PROMPTS"][:, number]).tolist() for number in range(2)] == [[6.0], [2.0]]


def test_two_versions_of_a_task_share_a_batch_each_with_its_own_prompts_and_head(made: Made) -> None:
    model, engines = made
    old, new = task(model, "a", 1.0), task(model, "a", -1.0)
    found = model.run(2, pixels(1, 1), [new, old])
    np.testing.assert_allclose(found[0], expected(1, -1.0, 2), rtol=1e-6)
    np.testing.assert_allclose(found[1], expected(1, 1.0, 2), rtol=1e-6)
    assert [np.unique(engines[2].calls[0]["PROMPTS"][:, number]).tolist() for number in range(2)] == [[-2.0], [2.0]]


def test_large_logits_do_not_overflow(made: Made) -> None:
    model, _ = made
    (found,) = model.run(0, pixels(255), [task(model, "a", 1.0)])
    assert found.tolist() == [1.0, 0.0]


def test_the_own_classifier_loses_a_little_accuracy_with_each_merged_patch(made: Made, tmp_path: Path) -> None:
    model, _ = made
    model.add_classifier(parts("own", 1.0, True))
    (task,) = model.tasks.values()
    assert task.is_default and task.name == "own" and (task.latency_ms, task.utility) == (100.0, 1.0)
    # Of 16 tokens 4 are merged at -4; without prompts it is not computed at 2.
    assert task.accuracy == pytest.approx({-4: 1.0 - 0.1 * 4 / 16, 0: 1.0})
    (tmp_path / "registry.json").write_text("{")
    (message,) = model.reload_tasks()
    assert message.startswith(f"{tmp_path}: ") and list(model.tasks) == ["own"]
    (tmp_path / "registry.json").unlink()
    assert model.reload_tasks() == [] and list(model.tasks) == ["own"]
