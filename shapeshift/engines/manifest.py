"""The manifest of a folder of engines: its files, and the measured accuracy and latency of each engine.

A loader reads the manifest, never file names. It lists each file with size and SHA-256, so that a truncated or replaced
engine is rejected before a runtime opens it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shapeshift.errors import EngineError, InvalidInputError
from shapeshift.files import HASHES, RememberedHashes, file_sha256

FILE_NAME, TOKENIZER = "manifest.json", "tokenizer.json"
FORMAT = 2
REBUILD = "run `shapeshift engines`"

T = TypeVar("T")


@dataclass(frozen=True)
class GeneratedSettings:
    """Parameters that `make engines` adds to the generated config.pbtxt.

    engines          folder of engines, relative to the model's folder
    manifest_sha256, checkpoint_sha256  hashes that the engines must have
    answers_version  of a text model, see `Manifest.answers_version`; empty: unknown
    checkpoint_name  `checkpoint` as the user wrote it, where it became a path; else empty
    profile          measured latencies, JSON
    labels           the class names of LOGITS or TOKEN_LOGITS, a JSON list
    prompts          the texts that `prompt_name` chooses from, JSON {name: text}
    device_memory    what the model wants of its GPU's memory, see `device_plan`
    similarity       of an image model with a tower for texts, what makes logits of cosines: JSON [scale, bias or null]
    """

    engines: str = ""
    manifest_sha256: str = ""
    checkpoint_sha256: str = ""
    answers_version: str = ""
    checkpoint_name: str = ""
    profile: str = ""
    labels: str = "[]"
    prompts: str = "{}"
    device_memory: str = ""
    similarity: str = ""


@dataclass(frozen=True)
class Latency:
    """One measured point: `rows` texts of `tokens` tokens in all, one thread, in milliseconds.

    Engines are compared by `best_ms`, the smallest sample: other load on the machine only adds time.
    """

    tokens: int
    rows: int
    median_ms: float
    p99_ms: float
    best_ms: float


@dataclass(frozen=True)
class EngineEntry:
    """One engine and its static shape; `tokens` = `rows` = None for the dynamic engine, which takes any shape."""

    file: str
    tokens: int | None
    rows: int | None
    max_error: float
    min_cosine: float
    latency: tuple[Latency, ...]

    @property
    def name(self) -> str:
        return "dynamic" if self.tokens is None else str(self.tokens)


@dataclass(frozen=True)
class Output:
    """An output tensor: Triton's data type and its dims without the row axis, -1 for one value per token."""

    name: str
    data_type: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hash of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that a process needs to know before it opens the engines of one model."""

    model: str
    checkpoint_sha256: str
    build_key: str
    provider: str
    provider_version: str
    precision: str
    vocabulary: int
    max_tokens: int
    packs_rows: bool
    position_offset: int
    reference: str
    tolerance: str
    hardware: str
    outputs: tuple[Output, ...]
    files: dict[str, FileEntry]
    engines: tuple[EngineEntry, ...]
    # The class names of LOGITS, in order, what makes scores of them, and whether the checkpoint is a cross-encoder.
    labels: tuple[str, ...] = ()
    activation: str = ""
    cross_encoder: bool = False
    # Added to the ids of a pair's second text, so that engines can tell its token type; 0: token types are unused.
    type_stride: int = 0
    # Widths to which vectors may be cut, with commas, or any; empty: none is stated.
    dimensions: str = ""
    # Texts that a client may have put before its own, by name, and the one for requests that name none.
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    # Of a decoder that says yes or no to a pair: what stands around its texts, by the name of a prompt, "" for none.
    pair_templates: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # Why the precision is not the requested one; empty if it is.
    note: str = ""
    # The repository and commit of a hub that the checkpoint comes from, owner/model@commit; empty: none.
    checkpoint_origin: str = ""
    # MiB of a GPU's memory that all engines took when they had run; 0: they run on a CPU.
    device_mb: float = 0.0
    format: int = FORMAT

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder`."""
        (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def prompt(self, name: str | None) -> str:
        """The text of prompt `name`, None: of the default prompt. Raises InvalidInputError for an unknown name."""
        chosen = self.default_prompt if name is None else name
        if chosen not in self.prompts and chosen:
            names = ", ".join(self.prompts)
            allowed = f"one of the model's prompts: {names}" if names else "not given: this model has no prompts"
            raise InvalidInputError("parameter prompt_name", chosen, allowed)
        return self.prompts.get(chosen, "")

    def pair_template(self, name: str | None) -> tuple[str, str, str] | None:
        """What stands around a pair with the prompt `name`; None for a model that reads texts as they are."""
        if not self.pair_templates:
            return None
        self.prompt(name)
        before, between, behind = self.pair_templates[self.default_prompt if name is None else name]
        return before, between, behind

    @property
    def engine_mb(self) -> float:
        """MiB of the files of one engine."""
        return sum(entry.size for entry in self.files.values()) / len({entry.file for entry in self.engines}) / 2**20

    @property
    def pack_tokens(self) -> int:
        """The most tokens of the texts that share a call: more than those of the longest text where that pays."""
        return max(self.max_tokens, *(entry.tokens or 0 for entry in self.engines))

    def answers_version(self) -> int:
        """The same 63 bits for engines whose answers may be mixed: where and when they were built does not matter."""
        shapes = [(entry.tokens, entry.rows) for entry in self.engines]
        made_of = (self.checkpoint_sha256, self.provider, self.provider_version, self.precision)
        tokenizer = self.files[TOKENIZER].sha256 if TOKENIZER in self.files else ""
        read_as = (tokenizer, self.vocabulary, self.max_tokens, self.position_offset, self.type_stride)
        facts = json.dumps([made_of, read_as, shapes, [dataclasses.astuple(output) for output in self.outputs]])
        return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:8], "big") >> 1

    def check_files(self, folder: Path, hashes: Path | None = None) -> None:
        """Raise EngineError naming the first file that differs from the list; see the function `check_files`."""
        check_files(folder, self.files, hashes)


def hashes_file(folder: Path) -> Path:
    """The file of the build folder that remembers the hashes of the engines in `folder`, BUILD/engines/MODEL."""
    return folder.resolve().parent.with_name(HASHES)


def check_files(folder: Path, files: Mapping[str, FileEntry], hashes: Path | None = None) -> None:
    """Raise EngineError naming the first of `files` that is missing from `folder` or differs in size or content.

    hashes: the file that remembers the hashes of files that have not changed since; None: all are computed.
    """
    remembered = RememberedHashes(hashes)
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise EngineError(f"engine file {path} is missing; {REBUILD}")
        size = path.stat().st_size
        if size != entry.size:
            raise EngineError(f"engine file {path}: {size} bytes, {entry.size} in the manifest; {REBUILD}")
        if remembered.sha256(path) != entry.sha256:
            raise EngineError(f"engine file {path}: content differs from the manifest; {REBUILD}")


def load(folder: Path, expect_sha256: str | None = None) -> Manifest:
    """The manifest of the text engines in `folder`; see `read`."""
    return read(folder, _from_json, expect_sha256)


def read(folder: Path, parse: Callable[[dict[str, Any]], T], expect_sha256: str | None = None) -> T:
    """The manifest in `folder`, parsed by `parse`. `expect_sha256`: the hash that the file must have, if given.

    Raises EngineError for a missing, unreadable or replaced manifest.
    """
    path = folder / FILE_NAME
    try:
        content = path.read_bytes()
    except OSError:
        raise EngineError(f"no engine manifest {path}; {REBUILD}") from None
    if expect_sha256 is not None and hashlib.sha256(content).hexdigest() != expect_sha256:
        raise EngineError(f"manifest {path} is not the one that the model's config names; {REBUILD}")
    try:
        return parse(json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"manifest {path} cannot be read ({error}); {REBUILD}") from None


def sha256(folder: Path) -> str:
    """The hash of the manifest file in `folder`."""
    return file_sha256(folder / FILE_NAME)


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and hash of every file below `folder` except the manifest, by relative path."""
    return {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, file_sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE_NAME
    }


def _from_json(data: dict[str, Any]) -> Manifest:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
    engines = tuple(
        EngineEntry(**{**entry, "latency": tuple(Latency(**point) for point in entry["latency"])})
        for entry in data["engines"]
    )
    outputs = tuple(Output(o["name"], o["data_type"], tuple(o["dims"])) for o in data["outputs"])
    files = {name: FileEntry(**entry) for name, entry in data["files"].items()}
    labels = tuple(map(str, data.get("labels", ())))
    return Manifest(**{**data, "engines": engines, "outputs": outputs, "files": files, "labels": labels})
