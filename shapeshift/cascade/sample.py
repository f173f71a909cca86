"""Labelled texts, as `shapeshift cascade register` is given them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift.cascade.softmax import Array
from shapeshift.errors import InvalidInputError


@dataclass(frozen=True)
class Sample:
    """texts: each one or a pair, UTF-8; labels: as written, a class's name or number, or the number itself."""

    texts: list[list[bytes]]
    labels: list[str]

    @property
    def pairs(self) -> bool:
        return len(self.texts[0]) > 1

    def some(self, count: int) -> Sample:
        """So many of them, evenly spread; 0: all."""
        if not 0 < count < len(self.texts):
            return self
        picked = [row * len(self.texts) // count for row in range(count)]
        return Sample([self.texts[row] for row in picked], [self.labels[row] for row in picked])

    def numbers(self, names: Sequence[str]) -> Array:
        """The classes [n] of the labels, by their names or else by their numbers. Raises InvalidInputError."""
        known = {name: number for number, name in enumerate(names)}
        known |= {str(number): number for number in range(len(names)) if str(number) not in known}
        for row, label in enumerate(self.labels):
            if label not in known:
                raise InvalidInputError("label", label, f"one of the {len(names)} that the models tell apart", row)
        return np.array([known[label] for label in self.labels], dtype=np.int64)

    def values(self) -> Array:
        """The labels as numbers [n], for a regression. Raises InvalidInputError."""
        found = []
        for row, label in enumerate(self.labels):
            try:
                found.append(float(label))
            except ValueError:
                raise InvalidInputError("label", label, "a number", row) from None
        return np.array(found)


def read(path: Path) -> Sample:
    """A .jsonl file of {"text", "pair" (or none), "label"}, or a .tsv file of text, pair (or none) and label.

    Raises InvalidInputError naming the line.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("sample", str(path), f"a readable text file ({error})") from None
    rows = [_row(path, number, line) for number, line in enumerate(lines)]
    if not rows or len({len(texts) for texts, _ in rows}) > 1:
        raise InvalidInputError("sample", str(path), "at least one text; all of them pairs, or none")
    return Sample([texts for texts, _ in rows], [label for _, label in rows])


def _row(path: Path, number: int, line: str) -> tuple[list[bytes], str]:
    if path.suffix == ".jsonl":
        return _json_row(number, line)
    parts = line.split("\t")
    if len(parts) not in (2, 3) or not all(parts):
        raise InvalidInputError("sample", line, "text, perhaps its pair, and label, parted by tabs", number)
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
