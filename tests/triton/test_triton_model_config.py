"""The text of a config.pbtxt: what is written is read again, and a person can read it too."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.errors import InvalidInputError, NotFoundError, ShapeshiftError
from shapeshift.serving.model_args import Signature, Tensor
from shapeshift.triton import model_config


@pytest.mark.parametrize("value", ["São Paulo", "서울", 'a "quoted" word\nand a second line'])
def test_a_parameter_is_read_as_it_was_written(tmp_path: Path, value: str) -> None:
    config = model_config.read(_file(tmp_path, 'name: "front"\n'))
    model_config.set_parameter(config, "prompt", value)
    file = tmp_path / "written.pbtxt"
    model_config.write(config, file)
    assert model_config.read(file) == config
    # Letters beyond ASCII stay letters: people read and edit this file.
    assert value.isascii() or value in file.read_text()


def test_as_json_has_the_names_of_the_file(tmp_path: Path) -> None:
    config = model_config.read(_file(tmp_path, 'name: "front"\nmax_batch_size: 4\ninput { name: "TEXT" dims: -1 }\n'))
    found = model_config.as_json(config)
    assert found["max_batch_size"] == 4 and found["input"] == [{"name": "TEXT", "dims": ["-1"]}]


def test_a_value_of_zero_counts_as_stated(tmp_path: Path) -> None:
    config = model_config.read(_file(tmp_path, 'name: "front"\nmax_batch_size: 0\n'))
    assert model_config.as_json(config) == {"name": "front", "max_batch_size": 0}
    assert "max_batch_size" not in model_config.as_json(model_config.from_json({"name": "front"}))


def test_complete_adds_what_is_left_out_and_keeps_what_is_stated(tmp_path: Path) -> None:
    config = model_config.read(_file(tmp_path, 'name: "front"\nmax_batch_size: 4\n'))
    made = model_config.complete(config, Signature((Tensor("TEXT", "TYPE_STRING"),), (Tensor("OUT", "TYPE_FP32"),)))
    found = model_config.as_json(made)
    assert (found["name"], found["max_batch_size"]) == ("front", 4)
    assert [found[kind][0]["name"] for kind in ("input", "output")] == ["TEXT", "OUT"]
    assert "input" not in model_config.as_json(config)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            'name: "a"\nnonsense: 1\n',
            r"config\.pbtxt:2: got 'nonsense: 1'; Message type .* has no field named",
        ),
        ('name: "a"\n\ninput [\n', r"config\.pbtxt:4: .*Expected \"\{\""),
        ("nonsense: 1", r"config\.pbtxt:1: got 'nonsense: 1'; Message type"),
    ],
)
def test_an_error_has_its_line_once(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        model_config.read(_file(tmp_path, text))


def test_a_file_that_is_not_there_and_one_that_cannot_be_read_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no model configuration at .*config.pbtxt"):
        model_config.read(tmp_path / "config.pbtxt")
    for unreadable in (tmp_path, _file(tmp_path, "")):
        if unreadable.is_file():
            unreadable.write_bytes(b"\xff\xfe")
        with pytest.raises(ShapeshiftError, match="cannot be read|UTF-8 text") as caught:
            model_config.read(unreadable)
        assert not isinstance(caught.value, NotFoundError)


def _file(folder: Path, text: str) -> Path:
    path = folder / "config.pbtxt"
    path.write_text(text)
    return path
