"""The labelled texts of the classifiers: `.venv/bin/python checkpoints/text-classifiers/texts.py` writes the samples.

Each task has texts to train on, to profile candidates with, and to measure on. The samples of the last two,
TASK-val.jsonl and TASK-test.jsonl, are what `shapeshift cascade register` and `python -m bench.cascade` read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "smollm2-adapters"))

from tasks import DOMAINS  # noqa: E402  in the folder of another checkpoint

SAMPLES = PROJECT / "build" / "text-classifiers"
PARTS = ("train", "val", "test")
OUTSIDE = ("oos_train", "oos_val", "oos_test")
"""The parts of CLINC150's out-of-scope texts: 100, 100 and 1,000."""
OUTSIDE_COUNTS = (500, 200, 500)
"""How many of them train, profile and test here."""
SENTIMENTS = ("negative", "positive")
Part = list[tuple[str, str]]
"""Texts with their labels."""


def _clinc150(data: Path) -> dict[str, Part]:
    parts = json.loads((data / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
    return {part: [(text, label) for text, label in rows] for part, rows in parts.items()}


def clinc150(data: Path) -> dict[str, Part]:
    """CLINC150: what a user of an assistant wants, one of 150 intents."""
    parts = _clinc150(data)
    return {part: parts[part] for part in PARTS}


def domains(data: Path) -> dict[str, Part]:
    """CLINC150: what a message is about, one of 10 domains."""
    domain_of = {intent: domain for domain, intents in DOMAINS.items() for intent in intents.split()}
    return {part: [(text, domain_of[label]) for text, label in rows] for part, rows in clinc150(data).items()}


def scope(data: Path) -> dict[str, Part]:
    """CLINC150: whether a message has one of the intents. To profile and to test, two of eleven have none, as there."""
    rng, parts = random.Random(0), _clinc150(data)
    outside = [text for part in OUTSIDE for text, _ in parts[part]]
    rng.shuffle(outside)
    tasks: dict[str, Part] = {}
    for part, count in zip(PARTS, OUTSIDE_COUNTS, strict=True):
        inside = [text for text, _ in parts[part]]
        inside = inside if part == "train" else rng.sample(inside, count * 9 // 2)
        tasks[part] = [(text, "in_scope") for text in inside] + [(text, "out_of_scope") for text in outside[:count]]
        del outside[:count]
    return tasks


def sst2(data: Path) -> dict[str, Part]:
    """SST-2: whether a sentence about a film is positive."""

    def rows(part: str) -> Part:
        lines = (data / "sst2" / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
        return [(text, SENTIMENTS[int(label)]) for text, label in (line.rsplit("\t", 1) for line in lines if line)]

    return {"train": rows("train"), "val": rows("dev"), "test": rows("test")}


TASKS: dict[str, Callable[[Path], dict[str, Part]]] = {
    "clinc150": clinc150,
    "domains": domains,
    "scope": scope,
    "sst2": sst2,
}
"""[data folder] to the parts of a task."""


def write_samples(data: Path, folder: Path) -> None:
    """Write TASK-val.jsonl and TASK-test.jsonl of all tasks into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, read in TASKS.items():
        parts = read(data)
        for part in PARTS[1:]:
            lines = [json.dumps({"text": text, "label": label}) for text, label in parts[part]]
            (folder / f"{task}-{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def arguments(description: str) -> argparse.ArgumentParser:
    """The options of this script and of train.py."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = os.environ.get("SHAPESHIFT_DATA") or PROJECT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder with clinc150/ and sst2/ (%(default)s)")
    return parser


if __name__ == "__main__":
    write_samples(arguments(__doc__).parse_args().data, SAMPLES)
