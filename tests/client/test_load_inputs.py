"""The inputs of a load test, from the configuration that the server states."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from client import load_inputs
from client.load_inputs import Choice, make
from shapeshift.adapter_cache.registry import store
from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError, UnsupportedError
from shapeshift.triton import model_config

FRONTS = Path(__file__).resolve().parents[2] / "model_repository"
FEW = Choice(count=6, tokens=5)


def asked(
    monkeypatch: pytest.MonkeyPatch, *inputs: str, backend: str = "", decoupled: bool = False, **values: str
) -> None:
    """Let the server answer with such a configuration."""
    config = model_config.read(FRONTS / "encode" / "config.pbtxt")
    del config.input[:]
    config.backend = backend
    config.model_transaction_policy.decoupled = decoupled
    for name in inputs:
        config.input.add().name = name
    for name, value in values.items():
        model_config.set_parameter(config, name, value)
    monkeypatch.setattr(load_inputs, "_config", lambda url, model: config)


def test_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, "TEXT", "TEXT_PAIR", "INPUT_IDS")
    made = make("", "encode", FEW)
    assert len(made.entries) == 6 and len({entry["TEXT"][0] for entry in made.entries}) > 1
    assert made.entries == make("", "encode", FEW).entries
    assert not made.streaming


@pytest.mark.parametrize("decoupled", [False, True])
def test_prompts(monkeypatch: pytest.MonkeyPatch, decoupled: bool) -> None:
    asked(monkeypatch, "text_input", "stream", backend="fused_decode", decoupled=decoupled)
    made = make("", "generate", FEW)
    assert made.streaming == decoupled
    assert all(
        entry["max_tokens"] == [5] and entry.get("stream") == ([True] if decoupled else None) for entry in made.entries
    )


def test_adapters_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked(monkeypatch, "text_input", backend="adapter_cache", forward_to="generate_lora")
    with pytest.raises(NotFoundError, match=r"adapters: none in .*generate_lora; name some"):
        make("", "generate_lora_unary", FEW, tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    for file in store.FILES:
        (source / file).write_text("x")
    for name in ("one", "two"):
        store.add(tmp_path / "adapters" / "generate_lora", name, source, pinned=False)
    made = make("", "generate_lora_unary", FEW, tmp_path)
    assert [lora(entry) for entry in made.entries] == ["one", "two"] * 3
    chosen = make("", "generate_lora", Choice(count=2, adapters=("mine",)), tmp_path)
    assert [lora(entry) for entry in chosen.entries] == ["mine", "mine"]


def lora(entry: Any) -> str:
    return str(json.loads(entry["sampling_parameters"][0])["lora_name"])


def test_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked(monkeypatch, "IMAGE")
    made = make("", "classify_image", FEW)
    assert len(made.entries) == 6 and image(made.entries[0]).size == (224, 224)
    with pytest.raises(InvalidInputError, match="images: got"):
        make("", "classify_image", Choice(images=str(tmp_path)))
    Image.new("L", (8, 9)).save(tmp_path / "own.png")
    (own,) = make("", "classify_image", Choice(images=str(tmp_path))).entries
    assert image(own).size == (8, 9)


def image(entry: Any) -> Image.Image:
    tensor = base64.b64decode(entry["IMAGE"]["b64"])
    assert int.from_bytes(tensor[:4], "little") == len(tensor) - 4
    return Image.open(io.BytesIO(tensor[4:]))


def test_other_models_and_no_server(monkeypatch: pytest.MonkeyPatch, free_ports: Any) -> None:
    with pytest.raises(ShapeshiftError, match="no server answers at localhost:"):
        make(f"localhost:{free_ports(1)[0]}", "encode", FEW)
    asked(monkeypatch, "SOUND")
    with pytest.raises(UnsupportedError, match="model hear: takes SOUND; a load test knows TEXT, text_input, IMAGE"):
        make("", "hear", FEW)
