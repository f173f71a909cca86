"""`make engines` for image fronts: engines that compute what the eager model does, built once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from timm_models import small_checkpoint
from token_tasks import GAMMAS, front, noise, places

from build_engines import image_engines, images
from shapeshift.engines import manifest, precision, registry, verify
from shapeshift.engines.protocol import Engine, Runtime
from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.token_adapt import image_manifest, vision
from shapeshift.token_adapt.gamma_module import GammaModule
from shapeshift.token_adapt.schedule import expand
from shapeshift.token_adapt.timm_weights import read_model
from shapeshift.triton import modelconfig


def publish(one: images.ImageFront, root: Path) -> tuple[image_manifest.ImageManifest, bool]:
    return images.publish(one, places(root), lambda step: None)


@pytest.mark.parametrize("provider", ["openvino", "onnxruntime"])
def test_engines_compute_what_the_eager_model_does(house: Path, provider: str) -> None:
    made, fresh = publish(front(house, provider=provider), house)
    folder = house / "build" / "engines" / "classify_image"
    assert fresh is (provider == "onnxruntime") and [entry.gamma for entry in made.engines] == list(GAMMAS)
    model, _, _ = read_model(house / "checkpoints" / "small")
    prompts, tasks = torch.randn(3, 2, 2, 16), np.array([2, 0, 1, 1, 2, 0, 2])
    folded = model.fold(prompts)
    pixels = noise(7)
    for entry in made.engines:
        runtime = registry.provider(provider).open(folder / entry.folder, "f32", 1)
        inputs: dict[str, np.ndarray] = {"PIXELS": pixels}
        own = None
        if entry.gamma > 0:
            inputs |= {"TASKS": tasks, "PROMPTS": torch.stack(folded).numpy()}
            own = [part[torch.from_numpy(tasks)] for part in folded]
        got = runtime.engine(None, None).run(inputs)["FEATURES"]
        wanted = model(torch.from_numpy(pixels), expand(entry.gamma, 16, 2), own)
        np.testing.assert_allclose(got, wanted.numpy(), atol=1e-4)
        assert entry.max_error < 1e-4 and [point.images for point in entry.latency] == [1, 4, 16, 64]
        assert entry.tokens == 1 + {-5: 6, 0: 16, 2: 16}[entry.gamma] and entry.memory_mb > 0


def test_what_is_current_stays(house: Path) -> None:
    folder = house / "build" / "engines" / "classify_image"
    made = image_manifest.load(folder)
    again, fresh = publish(front(house), house)
    assert not fresh and again == made
    other = front(house, gammas="0", provider="onnxruntime")
    changed, fresh = publish(other, house)
    assert fresh and [entry.gamma for entry in changed.engines] == [0]
    planned = images.plan(other, places(house))
    assert images.is_current(planned, folder)
    small_checkpoint(house / "checkpoints" / "small", seed=1)
    assert not images.is_current(images.plan(other, places(house)), folder)
    (folder / "folding.safetensors").write_bytes(b"short")
    assert not images.is_current(planned, folder)


def test_the_generated_configuration_states_everything(house: Path) -> None:
    made = image_manifest.load(house / "build" / "engines" / "classify_image")
    target = house / "build" / "repository" / "classify_image"
    stated = modelconfig.parameters(modelconfig.read(target / "config.pbtxt"))
    assert (stated["provider"], stated["precision"], stated["threads"]) == ("openvino", "f32", "1")
    assert (target / stated["tasks_dir"]).resolve() == house / "tasks"
    engines = target / stated["engines"]
    assert manifest.sha256(engines) == stated["manifest_sha256"]
    assert image_manifest.load(engines, stated["manifest_sha256"]) == made
    profile = json.loads(stated["profile"])
    assert [one["gamma"] for one in profile["gammas"]] == list(GAMMAS)
    assert all(len(one["latency"]) == 4 for one in profile["gammas"])


def test_an_engine_off_the_reference_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.MIN_COSINE, "f32", 1.1)
    with pytest.raises(EngineError, match=r"gamma -5 .*off the reference"):
        publish(front(tmp_path, provider="onnxruntime"), tmp_path)
    assert not (tmp_path / "build" / "engines" / "classify_image").exists()
    assert not (tmp_path / "build" / "repository" / "classify_image").exists()


def test_a_gamma_off_the_reference_in_bf16_is_built_in_f32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: True)
    measured = image_engines._deviation

    def deviation(module: GammaModule, engine: Engine, images: int) -> verify.Deviation:
        found = measured(module, engine, images)
        # bf16 chooses other tokens when it merges; a CPU without bf16 cannot show that.
        return verify.Deviation(0.3, 0.95) if module.gamma < 0 and opened[-1] == "bf16" else found

    opened: list[str] = []
    provider = registry.provider("openvino")

    def open_it(self: object, folder: Path, stated: str, threads: int) -> Runtime:
        opened.append(stated)
        return real_open(self, folder, stated, threads)

    real_open = type(provider).open
    monkeypatch.setattr(type(provider), "open", open_it)
    monkeypatch.setattr(image_engines, "_deviation", deviation)
    made, _ = publish(front(tmp_path, precision="bf16"), tmp_path)
    assert made.precision == "bf16"
    assert {entry.gamma: entry.precision for entry in made.engines} == {-5: "f32", 0: "bf16", 2: "bf16"}
    assert made.tolerance.endswith("; f32 and at least 0.99999 where bf16 was off: gamma -5")
    stated = modelconfig.parameters(modelconfig.read(tmp_path / "build/repository/classify_image/config.pbtxt"))
    assert [one["precision"] for one in json.loads(stated["profile"])["gammas"]] == ["f32", "bf16", "bf16"]
    # Serving opens each engine in its own precision.
    opened.clear()
    vision.open_model(tmp_path / "build" / "engines" / "classify_image", tmp_path / "tasks", 1)
    assert opened == ["f32", "bf16", "bf16"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("gammas", "-5,2"), ("gammas", "0,x"), ("gammas", "0,300"), ("provider", "cuda"), ("bins", "none")],
)
def test_settings_that_cannot_be_meant(tmp_path: Path, field: str, value: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        front(tmp_path, **{field: value})
