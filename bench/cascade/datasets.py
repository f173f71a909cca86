"""The labelled texts of `bench.cascade`: CLINC150 and SST-2, see `public_data`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from bench.common.public_data import data_file, is_there
from shapeshift.cascade.profiling.samples import Sample

_FILES = {"clinc150": "clinc150/data_full.json", "sst2": "sst2/train.tsv"}
TASKS = tuple(_FILES)


def available() -> list[str]:
    """The tasks whose data are there."""
    return [task for task, file in _FILES.items() if is_there(file)]


@dataclass(frozen=True)
class Splits:
    """The parts of a task: `train` to fine-tune models, `val` to profile candidates, `test` to measure."""

    train: Sample
    val: Sample
    test: Sample
    labels: tuple[str, ...]


def read(task: str) -> Splits:
    """The three parts of a task. Raises NotFoundError naming a missing file."""
    parts = _clinc150() if task == "clinc150" else _sst2()
    samples = [Sample([[text.encode()] for text, _ in part], [label for _, label in part]) for part in parts]
    labels = tuple(sorted({label for _, label in parts[0]}))
    return Splits(train=samples[0], val=samples[1], test=samples[2], labels=labels)


def _clinc150() -> list[list[tuple[str, str]]]:
    data = json.loads(data_file(_FILES["clinc150"]).read_text(encoding="utf-8"))
    return [[(text, label) for text, label in data[split]] for split in ("train", "val", "test")]


def _sst2() -> list[list[tuple[str, str]]]:
    parts = []
    for split in ("train", "dev", "test"):
        lines = data_file(f"sst2/{split}.tsv").read_text(encoding="utf-8").splitlines()
        parts.append([(text, label) for text, _, label in (line.rpartition("\t") for line in lines if line)])
    return parts
