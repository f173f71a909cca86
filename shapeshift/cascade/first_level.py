"""The first level, whose engines live in the cascade's own process, so that an early answer costs no hop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shapeshift.cascade.settings import CascadeSettings
from shapeshift.cascade.table import Candidate, Table
from shapeshift.engines import manifest
from shapeshift.engines.hardware import cores
from shapeshift.engines.inline import InlinePool
from shapeshift.engines.manifest import Manifest
from shapeshift.engines.tokenizer import FILE_NAME as TOKENIZER_FILE
from shapeshift.engines.tokenizer import Encoded, TextTokenizer
from shapeshift.errors import EngineError
from shapeshift.serving.log import Log

_REGISTER = "`shapeshift cascade register` anew"


class FirstLevel:
    """The engines of one model and its tokenizer."""

    def __init__(self, folder: Path, table: Table, candidate: Candidate, own: CascadeSettings, log: Log) -> None:
        self.model = candidate.levels[0]
        self.made = checked(folder / self.model, table, candidate, 0)
        self.tokenizer = TextTokenizer(
            folder / self.model / TOKENIZER_FILE, self.made.max_tokens, type_stride=self.made.type_stride
        )
        self.pool = InlinePool(self.made, folder / self.model, own, own.engine_threads or cores(), log)

    def encode(self, texts: Sequence[bytes], row: int, truncate: bool) -> Encoded:
        """The tokens of one row, a text or a pair."""
        return self.tokenizer.encode_whole(texts[0], texts[1] if len(texts) > 1 else None, row, truncate)


def checked(folder: Path, table: Table, candidate: Candidate, level: int) -> Manifest:
    """The manifest of the engines of a level, counted from 0, which must be those that were profiled.

    Raises EngineError otherwise.
    """
    model, is_last = candidate.levels[level], level + 1 == len(candidate.levels)
    made = manifest.load(folder)
    stated = table.model(model).checkpoint_sha256
    if stated and stated != made.checkpoint_sha256:
        raise EngineError(f"candidate table of {table.task}: {model} comes from another checkpoint; {_REGISTER}")
    offered = [output.name for output in made.outputs]
    needed = ["LOGITS", *(["EMBEDDING"] if table.is_regression and not is_last else [])]
    missing = [name for name in needed if name not in offered]
    if missing:
        raise EngineError(f"{model} has no output {', '.join(missing)}; list it in its config.pbtxt, `make engines`")
    if len(made.labels) != len(table.labels):
        wanted = f"{len(table.labels)} labels in the candidate table of {table.task}"
        raise EngineError(f"{model} tells {len(made.labels)} labels apart, {wanted}; {_REGISTER}")
    made.check_files(folder)
    return made
