"""Model checkpoints in folders: read from safetensors or GGUF only, identified by a hash."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.engines.gguf import tensors as gguf_tensors
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.files import RememberedHashes, file_sha256
from shapeshift.settings import require

_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".h5", ".msgpack")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The weights of a checkpoint in one file, and the index of its shards. As in transformers the first one counts."""
# The same weights once more, under the names of another library.
_DUPLICATES = "consolidated*.safetensors"
TOKENIZER = "tokenizer.json"
# What transformers makes a tokenizer of where there is no tokenizer.json, and what stands beside both.
_VOCABULARIES = ("vocab.txt", "vocab.json", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tokenizer.model")
_BESIDE = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder with config.json, the files of a tokenizer and safetensors weights.

    origin: the repository and commit of a hub that it comes from, owner/model@commit; empty: none.
    tokenizer_sha256: of every file that transformers may read for the tokenizer and its chat template.
    """

    folder: Path
    config: dict[str, Any]
    sha256: str
    origin: str = ""
    tokenizer_sha256: str = ""

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / TOKENIZER


def find_folder(name: str, search: Sequence[Path] = ()) -> Path | None:
    """The folder `name`; None if there is none.

    An absolute path, or one that begins with a dot, is that folder. Any other name is searched for below each of
    `search`, and then in the working directory, where a folder may have the name by chance.
    """
    return next((folder.resolve() for folder in _candidates(name, search) if folder.is_dir()), None)


def find_file(name: str, search: Sequence[Path] = ()) -> Path | None:
    """As `find_folder`, for a file; links stay, since its name says which part of a split model it is."""
    return next((file.absolute() for file in _candidates(name, search) if file.is_file()), None)


def not_found(name: str, search: Sequence[Path] = ()) -> NotFoundError:
    """The error for a checkpoint that is no folder; it lists those that `find_folder` tries."""
    tried = [str(folder) for folder in _candidates(name, search) if str(folder) != name]
    searched = f", nor {', '.join(tried)}" if tried else ""
    return NotFoundError(
        f"checkpoint: no folder {name}{searched}; give a folder, a file, or a hub id such as owner/model@revision"
    )


def _candidates(name: str, search: Sequence[Path]) -> list[Path]:
    is_path = name.startswith(".") or Path(name).is_absolute()
    return [Path(name)] if is_path else [*(folder / name for folder in search), Path(name)]


def open_checkpoint(
    folder: Path,
    needed: Sequence[str] = (),
    origin: str = "",
    hashes: Path | None = None,
) -> Checkpoint:
    """Check `folder` and hash what an engine depends on: the `needed` files (config.json is one) and the weights.

    needed: empty for config.json and the tokenizer; hashes: the file that remembers the hashes of weights; None: they
    are computed.
    Raises InvalidInputError for a missing file or shard, or weights in a format that can execute code.
    """
    needed = needed or ("config.json", *_tokenizer_sources(folder))
    for name in needed:
        if not (folder / name).is_file():
            raise InvalidInputError("checkpoint", str(folder), f"must hold {name}")
        require_content(folder / name)
    _check_shards(folder)
    weights = weight_files(folder)
    for file in weights:
        require_content(file)
    if not weights:
        unsafe = sorted(path.name for path in folder.iterdir() if path.suffix in _UNSAFE_SUFFIXES)
        listing = f"found only {', '.join(unsafe)}, which can execute code when read; " if unsafe else ""
        raise InvalidInputError(
            "checkpoint", str(folder), f"{listing}weights must be *.safetensors (`shapeshift convert {folder}`)"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise InvalidInputError("checkpoint", str(folder / "config.json"), f"not JSON: {error}") from None
    remembered = RememberedHashes(hashes)
    hashed = [(name, file_sha256(folder / name)) for name in needed]
    sha256 = _joint([*hashed, *((path.name, remembered.sha256(path)) for path in weights)])
    of_tokenizer = [(name, file_sha256(folder / name)) for name in _tokenizer_files(folder)]
    return Checkpoint(folder, config, sha256, origin, _joint(of_tokenizer))


def _joint(hashes: Sequence[tuple[str, str]]) -> str:
    """The hash of files, from the name and the hash of each."""
    return hashlib.sha256("".join(f"{name}:{digest}\n" for name, digest in hashes).encode()).hexdigest()


def _tokenizer_sources(folder: Path) -> tuple[str, ...]:
    """The names of the files in `folder` that make its tokenizer; tokenizer.json if there are none."""
    names = [name for name in _VOCABULARIES if (folder / name).is_file()]
    if not names or (folder / TOKENIZER).is_file():
        return (TOKENIZER,)
    return (*names, *(name for name in _BESIDE if (folder / name).is_file()))


def _tokenizer_files(folder: Path) -> list[str]:
    """The names of all files in `folder` that transformers may read for the tokenizer, sorted."""
    patterns = ("tokenizer*.json", "*vocab*", "*.model", "*.tiktoken", "tekken.json", *_BESIDE, *_TEMPLATES)
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def weights_sha256(folder: Path) -> tuple[str, ...]:
    """The hashes of the files of weights in `folder`, sorted; their names do not count."""
    return tuple(sorted(file_sha256(path) for path in weight_files(folder)))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, as transformers chooses them.

    SINGLE, or else the shards that INDEX lists and `folder` has, or else all safetensors without copies for another
    library; of a folder that `gguf.folder` made, the GGUF files.
    """
    if (folder / gguf_tensors.INDEX).is_file():
        return sorted(folder.glob("*.gguf"))
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    whole = set(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        return sorted(whole & {folder / name for name in shard_names(folder)})
    return sorted(whole - set(folder.glob(_DUPLICATES)) or whole)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors in the files of weights, by name; without those of a file that is not whole."""
    from safetensors import SafetensorError, safe_open

    shapes = {name: entry.shape for name, entry in gguf_tensors.read_index(folder).items()}
    for file in () if shapes else weight_files(folder):
        with contextlib.suppress(SafetensorError, OSError), safe_open(str(file), framework="np") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def require_content(file: Path) -> None:
    """Raise InvalidInputError for the text that Git has in place of a large file."""
    with file.open("rb") as opened:
        pointer = opened.read(len(_POINTER)) == _POINTER
    remedy = "the file itself: this is a Git LFS pointer; `git lfs pull` in its folder fetches the file"
    require(not pointer, "checkpoint", str(file), remedy)


def _check_shards(folder: Path) -> None:
    """Raise InvalidInputError for the first file that the index of sharded weights lists and `folder` lacks."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return
    missing = [name for name in shard_names(folder) if not (folder / name).is_file()]
    if missing:
        allowed = f"must hold {missing[0]}, which {INDEX} lists: the download is not complete"
        raise InvalidInputError("checkpoint", str(folder), allowed)


def shard_names(folder: Path) -> list[str]:
    """The files that INDEX lists, sorted. Raises InvalidInputError for an index that is no such list."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return sorted({str(name) for name in content["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        allowed = "JSON with a weight_map; download it again"
        raise InvalidInputError("checkpoint", str(folder / INDEX), allowed) from None
