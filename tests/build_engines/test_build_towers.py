"""CLIP and SigLIP as `shapeshift add` takes them: a front for each tower, whose vectors are the library's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format

from shapeshift.build_engines import publish
from shapeshift.build_engines.add import NewModel, add
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.publish import validate
from shapeshift.build_engines.repository import read
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.front import TextFront
from shapeshift.serving import model_args
from shapeshift.serving.model_args import ModelArgs
from shapeshift.token_adapt.front import ImageFront
from shapeshift.triton import model_config
from tests.build_engines import two_towers
from tests.fakes import PbUtils, Request, as_served
from tests.sampling import few
from tests.token_adapt.test_vision_families import least_cosine

WORDS = ["a cat", "w3 w4 w5 dog", "a " * 30]


def arguments(paths: BuildPaths, name: str) -> ModelArgs:
    config = model_config.read(paths.generated / name / "config.pbtxt")
    stated = json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True))
    return model_args.read(
        {
            "model_config": stated,
            "model_name": name,
            "model_repository": str(paths.generated / name),
            "model_version": "1",
            "model_instance_name": f"{name}_0",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )


@pytest.mark.parametrize("family", few(("clip", "siglip"), ("siglip",)))
def test_both_towers_are_added_and_compute_what_the_library_does(tmp_path: Path, family: str) -> None:
    import torch

    theirs = two_towers.write(tmp_path / "tower", family)
    paths = BuildPaths(tmp_path, tmp_path / "build", tmp_path / "models")
    lines: list[str] = []
    assert add(NewModel(str(tmp_path / "tower"), "both"), paths, None, (), lines.append) == ["both", "both_text"]
    said = "\n".join(lines)
    assert "both: token_adapt (" in said and "both_text: polymorph (" in said
    for name in ("both", "both_text"):
        file = paths.repository / name / "config.pbtxt"
        config = model_config.read(file)
        model_config.set_parameter(config, "precision", "f32")
        model_config.write(config, file)
        publish.publish(read(paths.repository / name), paths)
    stated = model_config.parameters(model_config.read(paths.generated / "both" / "config.pbtxt"))
    assert stated["text_model"] == "both_text" and not any(
        gamma > 0 for gamma in json.loads("[" + stated["gammas"] + "]")
    )
    with torch.inference_mode():
        words = theirs.get_text_features(
            **two_towers.inputs_of(tmp_path / "tower", family, WORDS)
        ).pooler_output.numpy()
    pixels = np.random.default_rng(0).integers(0, 256, (3, two_towers.SIDE, two_towers.SIDE, 3), dtype=np.uint8)
    inputs = {"pixel_values": two_towers.normal(pixels), **two_towers.inputs_of(tmp_path / "tower", family, WORDS)}
    with torch.inference_mode():
        logits = theirs(**inputs).logits_per_image.numpy()
    text = as_served(TextFront(PbUtils(), arguments(paths, "both_text")))
    asked = Request(
        ("EMBEDDING",), {"truncate": True}, TEXT=np.array([[word.encode()] for word in WORDS], dtype=object)
    )
    text.execute([asked])
    of_words = asked.vectors("EMBEDDING")
    text.close()
    assert least_cosine(of_words, words) >= 0.9999
    images = as_served(ImageFront(PbUtils(), arguments(paths, "both")))
    asked = Request(("EMBEDDING",), {}, PIXELS=pixels)
    images.execute([asked])
    cosines = asked.vectors("EMBEDDING") @ of_words.T
    images.close()
    scale, bias = json.loads(stated["similarity"])
    assert (bias is None) == (family == "clip")
    np.testing.assert_allclose(scale * cosines + (bias or 0.0), logits, atol=2e-3)


def test_the_texts_of_siglip_are_padded_to_their_full_length(tmp_path: Path) -> None:
    two_towers.write(tmp_path / "tower", "siglip")
    paths = BuildPaths(tmp_path, tmp_path / "build", tmp_path / "models")
    add(NewModel(str(tmp_path / "tower"), "words", "polymorph"), paths, None, (), lambda line: None)
    file = paths.repository / "words" / "config.pbtxt"
    stated = model_config.parameters(model_config.read(file))
    assert stated["max_tokens"] == stated["bins"] == str(two_towers.TEXTS)
    text = file.read_text()
    file.write_text(
        text.replace(
            f'"bins" value {{ string_value: "{two_towers.TEXTS}"', '"bins" value { string_value: "none"'
        ).replace(f'"{two_towers.TEXTS}"', '"16"')
    )
    with pytest.raises(InvalidInputError, match="max_tokens: got 16; 28, to which this checkpoint's texts are padded"):
        validate("words", {"words"}, paths)
