"""The chat template of a checkpoint, in each of the files that may hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shapeshift.engines.text import chat_template_files
from shapeshift.engines.text.chat_template_files import ChatTemplateFiles
from shapeshift.errors import InvalidInputError


def folder_of(tmp_path: Path, config: Any = None, template: str | bytes = "", tokens: Any = None) -> Path:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if tokens is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    if template:
        (tmp_path / "chat_template.jinja").write_bytes(template.encode() if isinstance(template, str) else template)
    return tmp_path


def test_a_checkpoint_without_a_template(tmp_path: Path) -> None:
    assert chat_template_files.read(tmp_path) == ChatTemplateFiles()


def test_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "unk_token": 3}
    found = chat_template_files.read(folder_of(tmp_path, config, tokens={"bos_token": "old", "sep_token": "|"}))
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "|"}


def test_the_file_of_its_own_goes_before_the_configuration(tmp_path: Path) -> None:
    assert chat_template_files.read(folder_of(tmp_path, {"chat_template": "a"})).text == "a"
    assert chat_template_files.read(folder_of(tmp_path, {"chat_template": "a"}, "ä")).text == "ä"


def test_a_list_names_the_template_for_tools(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    others = [*listed, {"name": "rag", "template": "c"}]
    found = chat_template_files.read(folder_of(tmp_path, {"chat_template": others}))
    assert (found.text, found.tool_use) == ("a", "b")
    found = chat_template_files.read(folder_of(tmp_path, {"chat_template": listed[1:]}))
    assert (found.text, found.tool_use) == (None, "b")


WRONG: dict[str, tuple[Any, str | bytes, str]] = {
    "a number": ({"chat_template": 3}, "", "chat_template: got 3; a text, or a list of objects with name and template"),
    "a list of numbers": ({"chat_template": [3]}, "", "chat_template: got [3]; a text, or a list"),
    "a template that is a number": ({"chat_template": [{"name": "default", "template": 1}]}, "", "; a text, or a list"),
    "no object": ([], "", "tokenizer_config.json'; a JSON object"),
    "too long": ({}, "x" * 300_000, "chat_template default: got '300000 characters'; at most 262144 characters"),
    "not UTF-8": ({}, b"\xff", "a text in UTF-8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_are_none_are_refused(case: str, tmp_path: Path) -> None:
    config, template, said = WRONG[case]
    with pytest.raises(InvalidInputError) as raised:
        chat_template_files.read(folder_of(tmp_path, config, template))
    assert said in str(raised.value)
