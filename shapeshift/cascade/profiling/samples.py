"""The labelled texts that `shapeshift cascade register` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.cascade.policy.routing import Array
from shapeshift.errors import InvalidInputError


@dataclass(frozen=True)
class Sample:
    """texts: UTF-8, each row one text or a pair; labels: as written, the name or number of a class, or a number."""

    texts: list[list[bytes]]
    labels: list[str]

    @property
    def pairs(self) -> bool:
        return len(self.texts[0]) > 1

    def subset(self, count: int) -> Sample:
        """`count` rows, evenly spread; 0: all."""
        if not 0 < count < len(self.texts):
            return self
        picked = [row * len(self.texts) // count for row in range(count)]
        return Sample([self.texts[row] for row in picked], [self.labels[row] for row in picked])

    def classes(self, names: Sequence[str]) -> Array:
        """The class of each row [n], INT64. Labels are names, or numbers as text. Raises InvalidInputError."""
        number_of = {name: number for number, name in enumerate(names)}
        number_of |= {str(number): number for number in range(len(names)) if str(number) not in number_of}
        for row, label in enumerate(self.labels):
            if label not in number_of:
                raise InvalidInputError("label", label, f"one of the {len(names)} labels of the models", row)
        return np.array([number_of[label] for label in self.labels], dtype=np.int64)

    def values(self) -> Array:
        """The labels of a regression as numbers [n]. Raises InvalidInputError."""
        numbers = []
        for row, label in enumerate(self.labels):
            try:
                numbers.append(float(label))
            except ValueError:
                raise InvalidInputError("label", label, "a number", row) from None
        return np.array(numbers)


def read(path: Path) -> Sample:
    """The sample in a .jsonl file of {"text", "label"}, or a .tsv file of text and label; "pair" comes after the text.

    Raises InvalidInputError naming the line.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("sample", str(path), f"a readable text file ({error})") from None
    rows = [_row(path, number, line) for number, line in enumerate(lines)]
    if not rows or len({len(texts) for texts, _ in rows}) > 1:
        raise InvalidInputError("sample", str(path), "at least one text; all rows are pairs, or none is")
    return Sample([texts for texts, _ in rows], [label for _, label in rows])


def _row(path: Path, number: int, line: str) -> tuple[list[bytes], str]:
    if path.suffix == ".jsonl":
        return _json_row(number, line)
    parts = line.split("\t")
    if len(parts) not in (2, 3) or not all(parts):
        raise InvalidInputError("sample", line, "text, pair if any, and label, separated by tabs", number)
    return [part.encode() for part in parts[:-1]], parts[-1].strip()


def _json_row(number: int, line: str) -> tuple[list[bytes], str]:
    try:
        data: dict[str, Any] = json.loads(line)
        texts = [str(data[key]).encode() for key in ("text", "pair") if data.get(key)]
        label = str(data["label"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError("sample", line, f'{{"text": .., "label": ..}} ({error})', number) from None
    if not data.get("text"):
        raise InvalidInputError("sample", line, "a text", number)
    return texts, label
