"""The text of a config.pbtxt: what is written is read again, and a person can read it too."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def _file(folder: Path, text: str) -> Path:
    path = folder / "config.pbtxt"
    path.write_text(text)
    return path
