"""Each family's checkpoints: the numbers of their own library, in the eager model and in engines; broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shapeshift.build_engines.image import front as images
from shapeshift.build_engines.image import plan
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.errors import InvalidInputError, ShapeshiftError
from shapeshift.token_adapt.checkpoints.huggingface import FAMILIES
from shapeshift.token_adapt.checkpoints.reading import open_vision
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model import vision_model
from shapeshift.token_adapt.model.gamma_module import GammaModule
from shapeshift.token_adapt.tasks import registry
from tests.sampling import few
from tests.token_adapt.token_tasks import front, noise, paths, register, write_task
from tests.token_adapt.vision_families import CASES, MEAN, STD, write

BY_NAME = {f"{case.family}, {case.variant}": case for case in CASES}
# Engines of what no other test builds; all of them, at other gammas too, with `make test-long`.
IN_EVERY_RUN = ("dinov2, giant", "clip, projection", "siglip, tower")


def normal(pixels: np.ndarray) -> torch.Tensor:
    values = (torch.from_numpy(pixels) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return values.permute(0, 3, 1, 2)


def least_cosine(got: np.ndarray, wanted: np.ndarray) -> float:
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((got * wanted).sum(1) / lengths).min())


@pytest.mark.parametrize("name", BY_NAME)
def test_the_same_numbers_as_the_library(tmp_path: Path, name: str) -> None:
    case = BY_NAME[name]
    theirs = write(case, tmp_path)
    model, weight, bias = read_model(tmp_path)
    pixels = noise(3)
    with torch.inference_mode():
        wanted = theirs(normal(pixels))
    got = torch.from_numpy(GammaModule(model, 0).eval().features({"PIXELS": pixels}))
    assert (weight is not None) == case.has_classifier
    if weight is not None and bias is not None:
        got = got @ weight.T + bias
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", few(BY_NAME, IN_EVERY_RUN))
def test_an_engine_equals_the_library(tmp_path: Path, name: str, request: pytest.FixtureRequest) -> None:
    theirs = write(BY_NAME[name], tmp_path)
    model, weight, bias = read_model(tmp_path)
    provider = PROVIDERS["openvino"]
    in_full = "long" in request.config.option.markexpr
    for gamma in (0, -5, 2) if in_full else (0,):
        module = GammaModule(model, gamma).eval()
        folder = tmp_path / f"gamma_{gamma}"
        folder.mkdir()
        provider.export(module, module.example(2), folder, "f32")
        provider.compile(folder, "f32", None, None)
        inputs = module.example(4, seed=4)
        got = provider.open(folder, "f32", 1).engine(None, None).run(inputs)["FEATURES"].copy()
        assert least_cosine(got, module.features(inputs)) >= 0.99999
        if gamma == 0:
            if weight is not None and bias is not None:
                got = got @ weight.numpy().T + bias.numpy()
            with torch.inference_mode():
                assert least_cosine(got, theirs(normal(inputs["PIXELS"])).numpy()) >= 0.99999


def test_every_family_is_compared() -> None:
    assert {case.family for case in CASES} == {"timm", *FAMILIES}


def test_the_own_classifier_is_served(tmp_path: Path) -> None:
    """It is the default task, and merges tokens; without prompts it is not computed above gamma 0."""
    theirs = write(BY_NAME["vit, classifier"], tmp_path / "checkpoints" / "vit")
    stated = front(tmp_path, checkpoint="vit", tasks_dir="", task="classifier", gammas="-3,0,2", provider="onnxruntime")
    made, _ = images.publish(stated, paths(tmp_path), lambda step: None)
    assert images.served(made).startswith("ViT: vectors of 32 numbers (cosine to gamma 0 of generated images: ")
    assert images.served(made).endswith("at -3), task classifier, 5 labels, and registered tasks")
    model = vision_model.open_model(tmp_path / "build" / "engines" / "classify_image", tmp_path / "none", 1)
    assert model.reload_tasks() == [] and model.gammas == (-3, 0)
    task = model.tasks["classifier"]
    assert task.is_default and task.labels == tuple(f"kind {index}" for index in range(5))
    assert task.accuracy.keys() == {-3, 0} and task.accuracy[-3] < task.accuracy[0] == 1.0
    pixels, tasks = noise(3), [task] * 3
    with torch.inference_mode():
        wanted = theirs(normal(pixels)).softmax(1).numpy()
    np.testing.assert_allclose(np.stack(model.run(0, pixels, tasks)), wanted, atol=1e-4)
    assert np.abs(np.stack(model.run(-3, pixels, tasks)) - wanted).max() > 1e-4


def test_gammas_above_0_have_engines_where_a_task_may_have_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a classifier: once a task is registered, or where `use_gammas` names them. What is built stays current."""
    write(BY_NAME["vit, classifier"], tmp_path / "checkpoints" / "vit")

    def planned(**stated: str) -> plan.ImagePlan:
        return images.check(front(tmp_path, checkpoint="vit", gammas="-3,0,2,4", **stated), paths(tmp_path))

    alone = planned()
    assert alone.gammas == (-3, 0)
    assert planned(use_gammas="0,4").gammas == (-3, 0, 4)
    write_task(tmp_path, "digits", 4)
    register(tmp_path, "digits")
    with_task = planned()
    assert with_task.gammas == (-3, 0, 2, 4)
    built = SimpleNamespace(build_key=with_task.key(), files={})
    monkeypatch.setattr(plan.image_manifest, "load", lambda folder: built)
    monkeypatch.setattr(plan.manifest, "check_files", lambda folder, files: None)
    registry.remove(tmp_path / "tasks", "digits")
    assert planned().gammas == (-3, 0) and plan.is_current(planned(), tmp_path)
    built.build_key = alone.key()
    assert plan.is_current(planned(), tmp_path) and not plan.is_current(with_task, tmp_path)


def test_the_first_task_compiles_only_the_gammas_that_are_missing(tmp_path: Path) -> None:
    write(BY_NAME["vit, classifier"], tmp_path / "checkpoints" / "vit")
    stated = front(tmp_path, checkpoint="vit", gammas="-3,0,2")
    alone, _ = images.publish(stated, paths(tmp_path), lambda step: None)
    write_task(tmp_path, "digits", 4)
    register(tmp_path, "digits")
    steps: list[str] = []
    made, _ = images.publish(stated, paths(tmp_path), steps.append)
    assert [step for step in steps if ": gamma" in step] == [
        "verify: gamma -3 in f32, 0 of 3 done",
        "verify: gamma 0 in f32, 1 of 3 done",
        "export, compile and verify: gamma 2 in f32, 2 of 3 done",
    ]
    assert [entry.gamma for entry in made.engines] == [-3, 0, 2] and alone.files.items() < made.files.items()


def test_labels_may_stand_in_a_file(tmp_path: Path) -> None:
    write(BY_NAME["timm, ViT"], tmp_path)
    before, described = open_vision(tmp_path)
    assert described.classifier is not None and described.classifier.labels == ("0", "1", "2", "3", "4")
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    after, described = open_vision(tmp_path)
    assert described.classifier is not None and described.classifier.labels == ("a", "b", "c", "d", "e")
    # Tasks that were trained over the checkpoint stay valid.
    assert after.sha256 == before.sha256


def test_the_head_of_a_clip_model_of_timm_is_its_projection(tmp_path: Path) -> None:
    write(BY_NAME["timm, CLIP"], tmp_path)
    change(tmp_path / "config.json", lambda config: config["pretrained_cfg"].update(tag="openai"))
    _, described = open_vision(tmp_path)
    assert described.classifier is None and described.architecture.projection == 5


def test_a_sharded_checkpoint_is_read(tmp_path: Path) -> None:
    theirs = write(BY_NAME["vit, classifier"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in names if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    model, weight, _ = read_model(tmp_path)
    assert weight is not None and theirs(normal(noise(1))).shape == (1, len(weight))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"model-1\.safetensors.*not complete"):
        open_vision(tmp_path)


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    stated = json.loads(file.read_text())
    edit(stated)
    file.write_text(json.dumps(stated))


CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
Edit = Callable[[dict[str, Any]], object]
BROKEN: dict[str, tuple[str, Edit, str]] = {
    "an id without label": (
        CONFIG,
        lambda one: one["id2label"].pop("3"),
        r"id2label: got 'no label for \[3\]'.*labels",
    ),
    "a label too many": (CONFIG, lambda one: one["id2label"].update({"9": "x"}), r"id2label: got 'labels for \[9\]'"),
    "several labels an image": (
        CONFIG,
        lambda one: one.update(problem_type="multi_label_classification"),
        "problem_type",
    ),
    "another family": (CONFIG, lambda one: one.update(model_type="swin"), "model_type: got 'swin'; supported"),
    "another activation": (CONFIG, lambda one: one.update(hidden_act="relu"), "hidden_act: got 'relu'"),
    "other patches": (CONFIG, lambda one: one.update(patch_size=16), "patch_size: got 16; 8, as the tensors show"),
    "a block too few": (CONFIG, lambda one: one.update(num_hidden_layers=3), "num_hidden_layers: got 3; 2, as the"),
    "other heads": (CONFIG, lambda one: one.update(num_attention_heads=5), "num_heads: got 5; a divisor of the width"),
    "images of another size": (
        PROCESSOR,
        lambda one: one.update(size={"height": 64, "width": 64}),
        r"preprocessor_config\.json: size of the images: got 64; 32, image_size in config\.json",
    ),
    "indivisible images": (
        PROCESSOR,
        lambda one: one.update(size={"height": 36, "width": 36}),
        "image_size 36 is not a multiple of patch_size 8",
    ),
    "oblong images": (PROCESSOR, lambda one: one.update(size={"height": 32, "width": 64}), "size: got .*equal"),
    "another processor": (
        PROCESSOR,
        lambda one: one.update(image_processor_type="SwinProcessor"),
        "image_processor_type",
    ),
    "no deviation": (PROCESSOR, lambda one: one.update(image_std=[1, 1, 0]), "image_std: got .*std above 0"),
    "images that are not resized": (PROCESSOR, lambda one: one.update(do_resize=False), "do_resize"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_checkpoint_is_refused_before_the_build(tmp_path: Path, what: str) -> None:
    """By what `validate` calls too; the message names file, field and remedy."""
    file, edit, said = BROKEN[what]
    # DINOv2 takes images of any size that its patches divide.
    case = "dinov2, classifier" if what == "indivisible images" else "vit, classifier"
    write(BY_NAME[case], tmp_path / "checkpoints" / "broken")
    change(tmp_path / "checkpoints" / "broken" / file, edit)
    with pytest.raises(ShapeshiftError, match=said):
        images.check(front(tmp_path, checkpoint="broken"), paths(tmp_path))


def test_a_folder_without_processor_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "broken"
    write(BY_NAME["siglip, tower"], folder)
    # Without a classifier too: tasks are trained with the engines, into a registry of the model's own.
    images.check(front(tmp_path, checkpoint="broken", tasks_dir=""), paths(tmp_path))
    (folder / PROCESSOR).unlink()
    with pytest.raises(InvalidInputError, match="must hold preprocessor_config.json"):
        images.check(front(tmp_path, checkpoint="broken"), paths(tmp_path))
