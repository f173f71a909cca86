"""The labels of a checkpoint's own classifier: from labels.txt, else from its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError

FILE = "labels.txt"


def read_labels(folder: Path, labels: Any, field: str, count: int, unnamed: str) -> tuple[str, ...]:
    """The `count` labels of a classifier.

    labels.txt has one a line. labels: `field` of config.json, a list or an object from ids to labels; None: `unnamed`
    with {} for the id. Raises InvalidInputError naming the file, the field and the ids that have no label.
    """
    if count < 2:
        raise InvalidInputError(f"config.json: {field}", count, "a classifier with at least 2 outputs")
    if (folder / FILE).is_file():
        lines = (folder / FILE).read_text(encoding="utf-8").splitlines()
        return _checked(FILE, dict(enumerate(lines)), count)
    if labels is None:
        return tuple(unnamed.format(index) for index in range(count))
    return _checked(f"config.json: {field}", _by_id(f"config.json: {field}", labels), count)


def _by_id(field: str, labels: Any) -> dict[int, Any]:
    try:
        if isinstance(labels, Mapping):
            return {int(key): value for key, value in labels.items()}
        if isinstance(labels, Sequence) and not isinstance(labels, str):
            return dict(enumerate(labels))
    except (TypeError, ValueError):
        pass
    raise InvalidInputError(field, labels, "an object from ids to labels, or a list of labels")


def _checked(field: str, labels: Mapping[int, Any], count: int) -> tuple[str, ...]:
    ids = set(range(count))
    missing, extra = sorted(ids - set(labels)), sorted(set(labels) - ids)
    remedy = f"a label for each of the {count} outputs, ids 0 to {count - 1}; or name them in {FILE}, one a line"
    if missing or extra:
        problem = f"no label for {missing[:5]}" if missing else f"labels for {extra[:5]}"
        raise InvalidInputError(field, problem, remedy)
    for index in range(count):
        if not isinstance(labels[index], str) or not labels[index].strip():
            raise InvalidInputError(f"{field} {index}", labels[index], "text")
    return tuple(labels[index] for index in range(count))
