"""The inputs of a load test, from the configuration that the server states."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tritonclient.grpc import model_config_pb2

from client.load_inputs import Choice, make
from shapeshift.adapter_cache.registry import store
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError, UnsupportedError

FEW = Choice(count=6, tokens=5)


def ask(server: Any, *inputs: str, backend: str = "", decoupled: bool = False, **values: str) -> str:
    """The address of the server, which has models with such a configuration."""
    server.config = model_config_pb2.ModelConfig(backend=backend)
    server.config.model_transaction_policy.decoupled = decoupled
    for name in inputs:
        server.config.input.add().name = name
    for name, value in values.items():
        server.config.parameters[name].string_value = value
    return str(server.url)


def test_texts(server: Any) -> None:
    url = ask(server, "TEXT", "TEXT_PAIR", "INPUT_IDS")
    made = make(url, "encode", FEW)
    assert len(made.entries) == 6 and len({entry["TEXT"][0] for entry in made.entries}) > 1
    assert made.entries == make(url, "encode", FEW).entries
    assert not made.streaming


@pytest.mark.parametrize("decoupled", [False, True])
def test_prompts(server: Any, decoupled: bool) -> None:
    url = ask(server, "text_input", "stream", backend="fused_decode", decoupled=decoupled)
    made = make(url, "generate", FEW)
    assert made.streaming == decoupled
    assert {tuple(entry["text_input"]["shape"]) for entry in made.entries} == {(1,)}
    assert all(
        entry["max_tokens"] == [5] and entry.get("stream") == ([True] if decoupled else None) for entry in made.entries
    )


def test_adapters_in_turn(server: Any, tmp_path: Path) -> None:
    url = ask(server, "text_input", backend="adapter_cache", forward_to="generate_lora")
    with pytest.raises(NotFoundError, match=r"adapters: none in .*generate_lora; name some"):
        make(url, "generate_lora_unary", FEW, tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    for file in store.FILES:
        (source / file).write_text("x")
    for name in ("one", "two"):
        store.add(tmp_path / "adapters" / "generate_lora", name, source, pinned=False)
    made = make(url, "generate_lora_unary", FEW, tmp_path)
    assert [lora(entry) for entry in made.entries] == ["one", "two"] * 3
    chosen = make(url, "generate_lora", Choice(count=2, adapters=("mine",)), tmp_path)
    assert [lora(entry) for entry in chosen.entries] == ["mine", "mine"]


def lora(entry: Any) -> str:
    return str(json.loads(entry["sampling_parameters"][0])["lora_name"])


def test_images(server: Any, tmp_path: Path) -> None:
    url = ask(server, "IMAGE")
    made = make(url, "classify_image", FEW)
    assert len(made.entries) == 6 and image(made.entries[0]).size == (224, 224)
    with pytest.raises(InvalidInputError, match="images: got"):
        make(url, "classify_image", Choice(images=str(tmp_path)))
    Image.new("L", (8, 9)).save(tmp_path / "own.png")
    (own,) = make(url, "classify_image", Choice(images=str(tmp_path))).entries
    assert image(own).size == (8, 9)


def image(entry: Any) -> Image.Image:
    tensor = base64.b64decode(entry["IMAGE"]["b64"])
    assert int.from_bytes(tensor[:4], "little") == len(tensor) - 4
    return Image.open(io.BytesIO(tensor[4:]))


def test_other_models_and_no_server(server: Any, free_ports: Any) -> None:
    with pytest.raises(ShapeshiftError, match="no server answers at localhost:"):
        make(f"localhost:{free_ports(1)[0]}", "encode", FEW)
    url = ask(server, "SOUND")
    with pytest.raises(UnsupportedError, match="model hear: takes SOUND; a load test knows TEXT, text_input, IMAGE"):
        make(url, "hear", FEW)
