"""Vectors of images: those of the checkpoint's own library, what merging makes of them, and requests for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from shapeshift.build_engines.image import front as images
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.checkpoints.weights import read_described, read_model, read_similarity
from shapeshift.token_adapt.model import vision_model
from shapeshift.token_adapt.model.gamma_module import GammaModule
from tests.fakes import Request
from tests.token_adapt.test_vision_families import BY_NAME, least_cosine, normal
from tests.token_adapt.token_models import LONG_MS, OUTPUTS
from tests.token_adapt.token_models import front as front_of
from tests.token_adapt.token_tasks import front, noise, paths
from tests.token_adapt.vision_families import OF_TOKENS, Case, write

ALL = (*OUTPUTS, "EMBEDDING")


def built(root: Path, case: str, **stated: str) -> tuple[Any, Any, vision_model.VisionModel]:
    """The library's own computation, the manifest, and the model that is served."""
    theirs = write(BY_NAME[case], root / "checkpoints" / "tower")
    options = {"checkpoint": "tower", "tasks_dir": "", "gammas": "-3,0", "provider": "onnxruntime", **stated}
    made, _ = images.publish(front(root, **options), paths(root), lambda step: None)
    model = vision_model.open_model(root / "build" / "engines" / "classify_image", root / "none", 1)
    assert model.reload_tasks() == []
    return theirs, made, model


def vectors(model: vision_model.VisionModel, gamma: int, pixels: np.ndarray) -> np.ndarray:
    return np.stack(model.run(gamma, pixels, [model.tasks["embedding"]] * len(pixels)))


@pytest.mark.parametrize("case", ["clip, with text", "siglip, with text"])
def test_the_vectors_are_those_of_the_library_and_merging_has_its_price(tmp_path: Path, case: str) -> None:
    theirs, made, model = built(tmp_path, case)
    pixels, task = noise(3), model.tasks["embedding"]
    with torch.inference_mode():
        wanted = theirs(normal(pixels)).numpy()
    got = vectors(model, 0, pixels)
    assert least_cosine(got, wanted) >= 0.9999
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1.0, atol=1e-5)
    assert task.accuracy[0] == 1.0 and 0.0 < task.accuracy[-3] < 1.0 and task.embedding_size == got.shape[1]
    assert made.vectors == "generated images"
    assert f"{task.accuracy[-3]:.3f} at -3" in images.served(made)


def test_the_cosines_are_those_of_the_images_that_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = noise(3)
    for place, one in enumerate(pixels):
        Image.fromarray(one).save(folder / f"{place}.png")
    _, made, model = built(tmp_path, "dinov3_vit, features", images=str(folder))
    each = (vectors(model, -3, pixels) * vectors(model, 0, pixels)).sum(1)
    assert made.vectors == str(folder) and model.tasks["embedding"].accuracy[-3] == pytest.approx(each.mean(), abs=1e-4)
    (folder / "broken.png").write_bytes(b"none")
    with pytest.raises(InvalidInputError, match=r"images: got .*broken\.png.*complete JPEG or PNG"):
        built(tmp_path, "dinov3_vit, features", images=str(folder))
    with pytest.raises(InvalidInputError, match="images: got .*a folder with images"):
        built(tmp_path, "dinov3_vit, features", images=str(tmp_path / "none"))


@pytest.mark.parametrize("pooling", ["cls", "mean", "cls,mean"])
@pytest.mark.parametrize("case", OF_TOKENS, ids=[case.family for case in OF_TOKENS])
def test_a_model_of_features_is_pooled_as_is_stated(tmp_path: Path, case: Case, pooling: str) -> None:
    theirs = write(case, tmp_path / "checkpoints" / "tower")
    planned = images.check(front(tmp_path, checkpoint="tower", tasks_dir="", pooling=pooling), paths(tmp_path))
    model, _, _ = read_described(planned.checkpoint.folder, planned.described)
    pixels = noise(2)
    with torch.inference_mode():
        tokens = theirs(normal(pixels)).numpy()
    parts = {"cls": tokens[:, 0], "mean": tokens[:, model.architecture.prefix :].mean(1)}
    wanted = np.concatenate([parts[part] for part in pooling.split(",")], axis=1)
    assert least_cosine(GammaModule(model, 0).eval().features({"PIXELS": pixels}), wanted) >= 0.99999


@pytest.mark.parametrize(
    ("case", "said"),
    [("clip, with text", "its projection or attention pool reads"), ("vit, classifier", "its classifier reads")],
)
def test_features_that_are_fixed_are_not_pooled_otherwise(tmp_path: Path, case: str, said: str) -> None:
    write(BY_NAME[case], tmp_path / "checkpoints" / "tower")
    with pytest.raises(InvalidInputError, match=f"pooling: got 'mean'; auto: {said}"):
        images.check(front(tmp_path, checkpoint="tower", tasks_dir="", pooling="mean"), paths(tmp_path))


def test_logits_of_cosines_have_the_scale_and_the_bias_of_the_checkpoint(tmp_path: Path) -> None:
    write(BY_NAME["siglip, with text"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"logit_scale": torch.tensor([2.0]), "logit_bias": torch.tensor([-10.0])}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_similarity(tmp_path) == (pytest.approx(math.exp(2.0)), -10.0)
    del tensors["logit_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_similarity(tmp_path) == (pytest.approx(math.exp(2.0)), None)
    write(BY_NAME["dinov3_vit, features"], tmp_path)
    assert read_similarity(tmp_path) is None


def test_rotated_positions_move_with_merged_patches(tmp_path: Path) -> None:
    """Patches that are all alike differ by place only: merged, they attend from the middle of their places."""
    write(BY_NAME["dinov3_vit, features"], tmp_path)
    model, _, _ = read_model(tmp_path)
    pixels = np.full((1, 32, 32, 3), 90, np.uint8)
    plain, merged = (GammaModule(model, gamma).eval().features({"PIXELS": pixels}) for gamma in (0, -3))
    assert least_cosine(merged, plain) > 0.99 and np.abs(merged - plain).max() > 0


def test_a_request_for_vectors_is_of_the_task_embedding(tmp_path: Path) -> None:
    _, _, model = built(tmp_path, "clip, with text")
    served = front_of(model, text_model="words", similarity="[7.5, null]")
    pixels, files = noise(2), {"latency_ms": LONG_MS}
    asked = Request(("EMBEDDING", "GAMMA", "OUTCOME"), files, PIXELS=pixels)
    everything, told = Request(ALL, files, PIXELS=pixels), Request(("DESCRIPTION",))
    served.execute([asked, everything, told])
    np.testing.assert_allclose(asked.vectors("EMBEDDING"), vectors(model, 0, pixels), atol=1e-5)
    assert asked.vectors("GAMMA").ravel().tolist() == [0, 0]
    np.testing.assert_allclose(everything.vectors("EMBEDDING"), asked.vectors("EMBEDDING"), atol=1e-5)
    facts = json.loads(told.vectors("DESCRIPTION").item())
    assert facts["kind"] == "image_embedding" and "also" not in facts and "labels" not in facts
    assert (facts["text_model"], facts["similarity"], facts["embedding_size"]) == ("words", [7.5, None], 24)
    labels = Request(("LABEL",), files, PIXELS=pixels)
    served.execute([labels])
    assert labels.refusal()[1] == "outputs: got 'LABEL'; EMBEDDING, which task embedding has"
    served.close()


def test_labels_and_vectors_of_one_model(tmp_path: Path) -> None:
    _, _, model = built(tmp_path, "vit, classifier")
    served, pixels = front_of(model), noise(2)
    asked, everything = (Request(names, {"latency_ms": LONG_MS}, PIXELS=pixels) for names in (("EMBEDDING",), ALL))
    mixed, told = Request(("EMBEDDING",), {"task": "classifier"}, PIXELS=pixels), Request(("DESCRIPTION",))
    served.execute([asked, everything, mixed, told])
    np.testing.assert_allclose(asked.vectors("EMBEDDING"), vectors(model, 0, pixels), atol=1e-5)
    # What is not asked for by name is what the default task has.
    assert everything.vectors("PROBABILITIES").shape == (2, 5)
    assert mixed.refusal()[1] == "outputs: got 'EMBEDDING'; LABEL, PROBABILITIES, which task classifier has"
    facts = json.loads(told.vectors("DESCRIPTION").item())
    assert (facts["kind"], facts["also"]) == ("image_classification", ["image_embedding"])
    assert facts["tasks"] == ["classifier", "embedding"]
    served.close()
