"""The module that image engines are exported from: its inputs by gamma; and the manifest of the engines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.errors import EngineError
from shapeshift.token_adapt.model import gamma_module
from shapeshift.token_adapt.model import manifest as image_manifest
from shapeshift.token_adapt.model.gamma_module import GammaModule
from shapeshift.token_adapt.model.manifest import BatchLatency, GammaEntry, ImageManifest, Preprocessing

SHAPE = SimpleNamespace(patches=16, depth=3, image_size=8, heads=2, head_width=5)


@pytest.fixture
def module_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a model that has only its shape."""
    monkeypatch.setattr(gamma_module, "expand", lambda gamma, patches, depth: (gamma, patches, depth))
    monkeypatch.setattr(GammaModule, "__setattr__", object.__setattr__)
    return lambda gamma: GammaModule(SimpleNamespace(architecture=SHAPE), gamma)  # type: ignore[arg-type]


@pytest.mark.parametrize("gamma", [-4, 0])
def test_without_added_tokens_images_are_the_only_input(module_of: Any, gamma: int) -> None:
    module = module_of(gamma)
    assert module.input_axes == {"PIXELS": {0: "images"}}
    assert list(module.example(3)) == ["PIXELS"]
    assert module.layers == (gamma, 16, 3)


@pytest.mark.parametrize("gamma", [1, 4])
def test_with_added_tokens_each_image_names_a_task_whose_prompts_are_given(module_of: Any, gamma: int) -> None:
    module = module_of(gamma)
    assert module.input_axes == {"PIXELS": {0: "images"}, "TASKS": {0: "images"}, "PROMPTS": {1: "tasks"}}
    found = module.example(64, tasks=3)
    assert {name: values.shape for name, values in found.items()} == {
        "PIXELS": (64, 8, 8, 3),
        "TASKS": (64,),
        "PROMPTS": (3, 3, 2, 2, gamma, 5),
    }
    assert {name: values.dtype for name, values in found.items()} == {
        "PIXELS": np.uint8,
        "TASKS": np.int64,
        "PROMPTS": np.float32,
    }
    # Every task and every shade is among them.
    assert set(found["TASKS"].tolist()) == {0, 1, 2}
    assert (found["PIXELS"].min(), found["PIXELS"].max()) == (0, 255)


def test_an_example_comes_from_its_seed(module_of: Any) -> None:
    first, again, other = (module_of(1).example(4, seed=seed) for seed in (0, 0, 1))
    for name, values in first.items():
        np.testing.assert_array_equal(values, again[name])
    assert (first["PIXELS"] != other["PIXELS"]).any()


# The manifest.


def made() -> ImageManifest:
    texts: dict[str, Any] = dict.fromkeys(
        (
            *("family", "checkpoint_sha256", "build_key", "provider_version", "precision", "reference", "tolerance"),
            "hardware",
        ),
        "",
    )
    entry = GammaEntry(-4, "g-4", "f32", 12, 1.5, 0.0, 1.0, 0.99, 0.98, (BatchLatency(1, 2.0, 4.0, 1.0),))
    return ImageManifest(
        model="m",
        provider="p",
        threads=1,
        preprocessing=Preprocessing(8),
        width=2,
        depth=1,
        heads=1,
        epsilon=1e-6,
        features=2,
        labels=("a", "b"),
        files={},
        engines=(entry,),
        **texts,
    )


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    made().save(tmp_path)
    assert image_manifest.load(tmp_path) == made()


@pytest.mark.parametrize("other", [4, 6])
def test_another_format_is_named(tmp_path: Path, other: int) -> None:
    stated = dataclasses.asdict(made()) | {"format": other}
    (tmp_path / "manifest.json").write_text(json.dumps(stated))
    with pytest.raises(EngineError, match=f"format {other}, this version reads 5"):
        image_manifest.load(tmp_path)


def test_the_profile_has_each_gamma_with_its_times(tmp_path: Path) -> None:
    found: Any = image_manifest.profile(made())
    (own,) = found["gammas"]
    assert own.pop("latency") == [[1, 2.0, 4.0, 1.0]]
    assert own == {"gamma": -4, "precision": "f32", "tokens": 12, "memory_mb": 1.5, "cosine": 0.98}
    assert (found["provider"], found["threads"]) == ("p ", 1)
