"""The labelled texts of `bench.cascade`: CLINC150 and SST-2, from the folder that SHAPESHIFT_DATA names."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from shapeshift.cascade.sample import Sample
from shapeshift.errors import NotFoundError

TASKS = ("clinc150", "sst2")


@dataclass(frozen=True)
class Splits:
    """train: models are fine-tuned on it; val: candidates are profiled on it; test: measured on it."""

    train: Sample
    val: Sample
    test: Sample
    labels: tuple[str, ...]


def data_folder() -> Path:
    """Where the public data lies."""
    return Path(os.environ.get("SHAPESHIFT_DATA", "../shared/data"))


def read(task: str) -> Splits:
    """The three parts of a task; NotFoundError naming the file that is missing."""
    parts = _clinc150() if task == "clinc150" else _sst2()
    made = [Sample([[text.encode()] for text, _ in part], [label for _, label in part]) for part in parts]
    labels = tuple(sorted({label for _, label in parts[0]}))
    return Splits(train=made[0], val=made[1], test=made[2], labels=labels)


def _clinc150() -> list[list[tuple[str, str]]]:
    path = data_folder() / "clinc150" / "data_full.json"
    data = json.loads(_text(path))
    return [[(text, label) for text, label in data[split]] for split in ("train", "val", "test")]


def _sst2() -> list[list[tuple[str, str]]]:
    found = []
    for split in ("train", "dev", "test"):
        lines = _text(data_folder() / "sst2" / f"{split}.tsv").splitlines()
        found.append([(text, label) for text, _, label in (line.rpartition("\t") for line in lines if line)])
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror}; SHAPESHIFT_DATA names the folder of public data") from None
