"""ONNX files as checkpoints: the numbers of the library whose model was exported; files that are refused."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from shapeshift.build_engines.hub.sources import find_checkpoint
from shapeshift.build_engines.image import onnx_checkpoint
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.cli.main import main
from shapeshift.errors import ShapeshiftError
from shapeshift.token_adapt.checkpoints.reading import open_vision
from shapeshift.token_adapt.checkpoints.weights import read_model
from shapeshift.token_adapt.model.gamma_module import GammaModule
from shapeshift.triton import model_config
from tests.conftest import BUILD
from tests.token_adapt.token_tasks import noise
from tests.token_adapt.vision_families import CASES, SIZE, Reference, write

BY_NAME = {f"{case.family}, {case.variant}": case for case in CASES}
READ = ("vit, classifier", "vit, features", "deit, distilled", "dinov2, classifier", "dinov2, other size")


def export(name: str, folder: Path) -> Reference:
    """Write the ONNX file of a small model of transformers, and the files that lie beside its weights."""
    case = BY_NAME[name]
    theirs = write(case, folder)
    model = getattr(importlib.import_module("transformers"), case.model).from_pretrained(folder).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.zeros(1, 3, SIZE, SIZE),),
            str(folder / "model.onnx"),
            dynamo=False,
            input_names=["pixel_values"],
            dynamic_axes={"pixel_values": {0: "images"}},
        )
    (folder / "model.safetensors").unlink()
    return theirs


def features(folder: Path, pixels: np.ndarray) -> torch.Tensor:
    """Of the checkpoint in `folder`; its logits, if it has a classifier."""
    model, weight, bias = read_model(folder)
    computed = torch.from_numpy(GammaModule(model, 0).eval().features({"PIXELS": pixels}))
    return computed if weight is None or bias is None else computed @ weight.T + bias


def normal(folder: Path, pixels: np.ndarray) -> torch.Tensor:
    made = open_vision(folder)[1].architecture
    values = (torch.from_numpy(pixels) / 255 - torch.tensor(made.mean)) / torch.tensor(made.std)
    return values.permute(0, 3, 1, 2)


@pytest.mark.parametrize("name", READ)
def test_the_same_numbers_as_the_exported_model(tmp_path: Path, name: str) -> None:
    theirs = export(name, tmp_path / "exported")
    folder = onnx_checkpoint.as_folder(tmp_path / "exported" / "model.onnx", tmp_path / "build")
    pixels = noise(3)
    with torch.inference_mode():
        expected = theirs(normal(folder, pixels))
    torch.testing.assert_close(features(folder, pixels), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vit, features", "dinov2, other size"])
def test_a_file_alone_says_what_it_is(tmp_path: Path, name: str) -> None:
    """Its family, its sizes and the number of its heads; its colours are those of the family."""
    theirs = export(name, tmp_path / "exported")
    file = (tmp_path / "exported" / "model.onnx").rename(tmp_path / "alone.onnx")
    folder = onnx_checkpoint.as_folder(file, tmp_path / "build")
    described = open_vision(folder)[1]
    assert described.architecture.heads == 4 and described.preprocessing.size == SIZE
    pixels = noise(3)
    with torch.inference_mode():
        expected = theirs(normal(folder, pixels))
    torch.testing.assert_close(features(folder, pixels), expected, rtol=1e-4, atol=1e-4)
    before = (folder / "model.safetensors").stat()
    assert onnx_checkpoint.as_folder(file, tmp_path / "build") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_a_file_and_a_folder_that_holds_it_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export("vit, classifier", tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHAPESHIFT_KEY", raising=False)
    assert main(["add", "exported/model.onnx"]) == 0
    assert main(["add", "exported", "--as", "second"]) == 0
    assert "of images, 32 x 32 pixels" in capsys.readouterr().out
    for name, place in (("model", tmp_path / "exported" / "model.onnx"), ("second", tmp_path / "exported")):
        stated = model_config.parameters(model_config.read(tmp_path / "model_repository" / name / "config.pbtxt"))
        assert stated["checkpoint"] == str(place)
    assert main(["validate"]) == 0


def test_a_folder_with_other_weights_is_read_as_before(tmp_path: Path) -> None:
    export("vit, features", tmp_path / "both")
    paths = BuildPaths(tmp_path, tmp_path / "build", tmp_path / "model_repository")
    (tmp_path / "both" / "model.safetensors").write_bytes(b"")
    assert find_checkpoint(str(tmp_path / "both"), paths).folder == tmp_path / "both"


def weights(change: Callable[[onnx.TensorProto], object]) -> Callable[[Path], None]:
    """A change of the last weight of the model's last layer."""

    def edit(file: Path) -> None:
        model = onnx.load(file)
        change([one for one in model.graph.initializer if len(one.dims) == 2][-1])
        file.write_bytes(model.SerializeToString())

    return edit


def quantised(one: onnx.TensorProto) -> None:
    one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one).astype(np.int8), one.name))


def other_numbers(one: onnx.TensorProto) -> None:
    one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one)[::-1].copy(), one.name))


def without_a_layer(file: Path) -> None:
    model = onnx.load(file)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name.endswith("layers.1.mlp.fc1.bias"):
                node.input[index] = "b"
    for one in model.graph.initializer:
        if one.name.endswith("layers.1.mlp.fc1.bias"):
            one.name = "b"
    file.write_bytes(model.SerializeToString())


def another_family(file: Path) -> None:
    model = onnx.load(file)
    for one in model.graph.initializer:
        one.name = one.name.replace("embeddings", "stem")
    file.write_bytes(model.SerializeToString())


def other_heads(file: Path) -> None:
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))


def of_swin(file: Path) -> None:
    config = json.loads((file.parent / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps(config | {"model_type": "swin"}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-5000]), "a whole ONNX file; download it again"),
    "empty": (lambda file: file.write_bytes(b""), "a whole ONNX file; download it again"),
    "quantised": (weights(quantised), "is INT8; FLOAT is read: use the file that is not quantised"),
    "too few numbers": (
        weights(lambda one: setattr(one, "raw_data", one.raw_data[:-8])),
        "a whole ONNX file",
    ),
    "weights elsewhere": (
        weights(lambda one: setattr(one, "data_location", one.EXTERNAL)),
        "is in another file; save all in one",
    ),
    "without a layer": (without_a_layer, "layer.1.intermediate.dense"),
    "another family": (another_family, "ViT, DeiT and DINOv2 with transformers' names are read"),
    "a family of config.json": (of_swin, "model_type: got 'swin'"),
    "other heads": (other_heads, "differs from the file's own answers: cosine"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_cannot_be_served_is_refused_by_name(tmp_path: Path, what: str) -> None:
    edit, said = BROKEN[what]
    export("vit, features", tmp_path / "exported")
    file = tmp_path / "exported" / "model.onnx"
    edit(file)
    with pytest.raises(ShapeshiftError, match=said) as refused:
        onnx_checkpoint.as_folder(file, tmp_path / "build")
    assert str(file) in str(refused.value)
    assert not [*(tmp_path / "build" / "checkpoints" / "from_onnx").glob("*")]


def test_several_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).touch()
    with pytest.raises(ShapeshiftError, match=r"one ONNX file; name one of .*a\.onnx, .*b\.onnx"):
        onnx_checkpoint.find(tmp_path)


def test_the_demo_answers_as_its_file_does() -> None:
    """All tokens after the last norm, of the file on ONNX Runtime and of our network."""
    file = BUILD / "checkpoints" / "dinov2-small" / "vit_s_focus.onnx"
    if not file.is_file():
        pytest.skip(f"no {file}: run `make setup`")
    folder = onnx_checkpoint.as_folder(file, BUILD)
    model = onnx.load(file)
    (output,) = [node.output[0] for node in model.graph.node if "backbone.layernorm.bias" in node.input]
    model.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None))
    pixels = np.random.default_rng(0).integers(0, 256, (2, 224, 224, 3), dtype=np.uint8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run([output], {"input_image": normal(folder, pixels).numpy()})
    ours = read_model(folder)[0]
    assert (ours.architecture.patches, ours.architecture.width, ours.architecture.heads) == (256, 384, 6)
    np.testing.assert_allclose(features(folder, pixels).numpy(), expected[:, 0], atol=1e-3)
