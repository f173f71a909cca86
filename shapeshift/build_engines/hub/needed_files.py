"""Which files of a model repository are needed: those that the build reads, and the weights only once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from shapeshift.engines.checkpoint import INDEX, SINGLE
from shapeshift.engines.gguf.files import SUFFIX as GGUF
from shapeshift.engines.gguf.files import chosen as gguf_files
from shapeshift.engines.text.sentence_modules import TOKEN_HEADS
from shapeshift.errors import InvalidInputError, listed

Read = Callable[[str], str]
"""The text of a file of the repository, by its name."""
_MOST_LISTED = 5
_MODULES, _TEMPLATES = "modules.json", "additional_chat_templates"
_TEXT_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
# The same weights once more: in the layout of the model's author, or rounded.
_DUPLICATES = ("consolidated", "pytorch_model")
_VARIANTS = (".fp16.", ".bf16.", ".fp32.", ".int8.")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def of_checkpoint(names: Sequence[str], read: Read, variant: str = "") -> list[str]:
    """The files of a checkpoint: of its folder, and of the folders that its modules.json lists; or those of a GGUF
    model, where `variant` names one or there are no other weights.

    Raises InvalidInputError for a repository without config.json, without weights, or with several such models.
    """
    if variant or not any(name.endswith(".safetensors") for name in names):
        models = gguf_files([PurePosixPath(name) for name in names if name.endswith(GGUF)], variant)
        if models:
            return [str(path) for path in models]
    folders = {"", _TEMPLATES}
    if _MODULES in names:
        folders |= {_folder(path) for path in _module_paths(read(_MODULES))}
    needed: list[str] = []
    for folder in sorted(folders):
        here = [name for name in names if str(PurePosixPath(name).parent) == (folder or ".")]
        needed += [name for name in here if name.endswith(_TEXT_SUFFIXES) and not name.endswith(".index.json")]
        needed += _weights(here, folder, read)
        needed += [name for name in here if name in TOKEN_HEADS and name not in needed]
    if not any(PurePosixPath(name).name == "config.json" for name in needed):
        raise InvalidInputError(
            "files of the repository", listed(names, _MOST_LISTED), "config.json; this is no model of transformers"
        )
    if not any(name.endswith(".safetensors") for name in needed):
        raise InvalidInputError(
            "files of the repository",
            listed(names, _MOST_LISTED),
            "weights as *.safetensors (download the folder and `shapeshift convert` it), or GGUF",
        )
    return sorted(needed)


def of_adapter(names: Sequence[str], read: Read) -> list[str]:
    """The two files of a PEFT adapter. Raises InvalidInputError for a repository that lacks one of them."""
    for name in ADAPTER_FILES:
        if name not in names:
            raise InvalidInputError(
                "files of the repository", listed(names, _MOST_LISTED), f"{name}; this is no adapter of PEFT"
            )
    return list(ADAPTER_FILES)


def _weights(here: Sequence[str], folder: str, read: Read) -> list[str]:
    """The safetensors files of one folder: the single file, else those of the index, else all but duplicates."""
    single, index = (f"{folder}/{name}" if folder else name for name in (SINGLE, INDEX))
    if single in here:
        return [single]
    if index in here:
        try:
            shards = {str(shard) for shard in json.loads(read(index))["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidInputError("file of the repository", index, "JSON with a weight_map") from None
        return [index, *(name for name in here if PurePosixPath(name).name in shards)]
    needed = [name for name in here if name.endswith(".safetensors") and not _is_duplicate(name)]
    return [name for name in needed if PurePosixPath(name).name not in ADAPTER_FILES]


def _is_duplicate(name: str) -> bool:
    last = PurePosixPath(name).name
    return last.startswith(_DUPLICATES) or any(part in last for part in _VARIANTS)


def _module_paths(text: str) -> list[str]:
    try:
        return [str(module["path"]) for module in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError("file of the repository", _MODULES, f"a list of modules ({error})") from None


def _folder(path: str) -> str:
    return "" if path in ("", ".") else str(PurePosixPath(path))
