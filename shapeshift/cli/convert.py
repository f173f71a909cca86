"""`shapeshift convert`: weights in pickles become safetensors, which builds read. No code of theirs runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.engines.checkpoint import INDEX
from shapeshift.errors import InvalidInputError
from shapeshift.progress import say, warn
from shapeshift.serving.error_codes import code_name, text_of

_MODEL, _SHARD = "pytorch_model.bin", "pytorch_model-*.bin"
_HEADS = ("sparse_linear.pt", "colbert_linear.pt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift convert`."""
    parser.add_argument("checkpoint", type=Path, metavar="FOLDER", help="with pytorch_model.bin, or heads of BGE-M3")


def run(options: argparse.Namespace) -> int:
    """Write a safetensors file beside each pickle that has none. Returns 2, after one line, if one is refused."""
    try:
        pickles = list(_pickles(options.checkpoint))
        if not pickles:
            listed = ", ".join((_MODEL, _SHARD, *_HEADS))
            allowed = f"a folder with {listed}, or folders of modules with one, that are not converted yet"
            raise InvalidInputError("FOLDER", str(options.checkpoint), allowed)
        shards: dict[Path, dict[str, str]] = {}
        for pickle, target in pickles:
            names = _convert(pickle, target)
            say(f"{target}: {len(names)} tensors of {pickle.name}")
            if pickle.match(_SHARD):
                shards.setdefault(target.parent, {}).update(dict.fromkeys(names, target.name))
        for folder, weight_map in shards.items():
            files.replace_text(folder / INDEX, json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")
    except Exception as error:  # noqa: BLE001  a library's error, too, is reported in one line
        warn(f"shapeshift convert: {code_name(error)}: {text_of(error)}")
        return 2
    return 0


def _pickles(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The files to read and to write; modules of sentence-transformers have a folder each."""
    for place in [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]:
        if not any(place.glob("model*.safetensors")):
            yield from ((one, one.with_name("model.safetensors")) for one in place.glob(_MODEL))
            yield from ((one, _shard(one)) for one in sorted(place.glob(_SHARD)))
    heads = [folder / name for name in _HEADS]
    yield from ((one, _shard(one)) for one in heads if one.is_file() and not _shard(one).exists())


def _shard(pickle: Path) -> Path:
    name = pickle.name.replace("pytorch_model", "model")
    return pickle.with_name(name).with_suffix(".safetensors")


def _convert(pickle: Path, target: Path) -> list[str]:
    """Write the tensors of a pickle, and return their names. Raises InvalidInputError for one that holds more."""
    import torch
    from safetensors.torch import save_file

    try:
        # Only tensors and plain containers: anything else that a pickle may call is refused.
        content: Any = torch.load(pickle, map_location="cpu", weights_only=True)
        tensors = {str(name): value for name, value in content.items()}
        valid = bool(tensors) and all(isinstance(value, torch.Tensor) for value in tensors.values())
    except Exception as error:  # noqa: BLE001  the library raises many types
        reason = str(error).strip().partition("\n")[0]
        raise InvalidInputError("checkpoint", str(pickle), f"a file of weights only ({reason})") from None
    if not valid:
        raise InvalidInputError("checkpoint", str(pickle), "a file of weights by name")
    seen: set[int] = set()
    for name, value in tensors.items():
        # Two names of one tensor are two tensors in the new file.
        is_shared = value.untyped_storage().data_ptr() in seen
        seen.add(value.untyped_storage().data_ptr())
        tensors[name] = value.clone() if is_shared else value.contiguous()
    with files.draft_of(target) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
        files.let_read(draft)
        files.flush(draft)
        draft.replace(target)
    files.flush(target.parent)
    return list(tensors)
