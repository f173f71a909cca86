"""The chat template of a checkpoint and the special tokens that it may use, read as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError

FILE_NAME, CONFIG, TOKEN_MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
FOLDER = "additional_chat_templates"
MAX_TEMPLATE = 262_144
"""Characters of the longest template."""
_TOKEN, _FURTHER_TOKENS = "_token", "model_specific_special_tokens"
_DEFAULT, _TOOL_USE = "default", "tool_use"


@dataclass(frozen=True)
class ChatTemplateFiles:
    """What a checkpoint says about conversations.

    text: Jinja source; tool_use: of conversations with tools; None where there is none of its own
    special_tokens: their texts by name, such as bos_token
    """

    text: str | None = None
    tool_use: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def read(folder: Path) -> ChatTemplateFiles:
    """The templates in `folder`, of a checkpoint or a published model: in files of their own, else in
    tokenizer_config.json.

    Raises InvalidInputError for a file that is not what its name says, or a template above MAX_TEMPLATE characters.
    """
    config = _json(folder / CONFIG)
    templates = _named(config.get("chat_template"), folder / CONFIG)
    if (folder / FILE_NAME).is_file():
        templates |= {_DEFAULT: _text(folder / FILE_NAME)}
    templates |= {file.stem: _text(file) for file in (folder / FOLDER).glob("*.jinja")}
    for name, text in templates.items():
        if len(text) > MAX_TEMPLATE:
            limit = f"at most {MAX_TEMPLATE} characters"
            raise InvalidInputError(f"chat_template {name}", f"{len(text)} characters", limit)
    entries = {**_json(folder / TOKEN_MAP), **config}
    further = entries.get(_FURTHER_TOKENS)
    named = {name: value for name, value in entries.items() if name.endswith(_TOKEN)}
    named |= further if isinstance(further, dict) else {}
    tokens = {name: token for name, value in named.items() if (token := _content(value)) is not None}
    return ChatTemplateFiles(templates.get(_DEFAULT), templates.get(_TOOL_USE), tokens)


def _named(value: Any, path: Path) -> dict[str, str]:
    """Templates by name. `value`: one text, or a list of objects with name and template."""
    try:
        entries = {_DEFAULT: value} if value is None or isinstance(value, str) else {}
        if not entries:
            entries = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        entries = {_DEFAULT: value}
    if not all(value is None or isinstance(value, str) for value in entries.values()):
        raise InvalidInputError(f"{path}: chat_template", value, "a text, or a list of objects with name and template")
    return {str(name): text for name, text in entries.items() if text is not None}


def _content(token: Any) -> str | None:
    """The text of a token, which is stated as text or as an object with more about it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_text(path))
    except ValueError as error:
        raise InvalidInputError("checkpoint", str(path), f"JSON ({error})") from None
    if not isinstance(content, dict):
        raise InvalidInputError("checkpoint", str(path), "a JSON object")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError("checkpoint", str(path), f"a text in UTF-8 ({error})") from None
