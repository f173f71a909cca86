"""Labelled images to train and profile a task with: a folder that has one sub-folder for each label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.images import decode
from shapeshift.token_adapt.interfaces import Pixels

Indices = NDArray[np.int64]

# One image in five is kept for the profile (section II-B).
HELD_OUT = 5
_SUFFIXES = (".jpg", ".jpeg", ".png")
_MAX_PIXELS = 100_000_000


@dataclass(frozen=True)
class Examples:
    """Images with the index of each one's label; `pixels` gives uint8 [n, size, size, 3] for n indices."""

    classes: Indices
    pixels: Callable[[Indices], Pixels]

    def __len__(self) -> int:
        return len(self.classes)

    def part(self, chosen: Indices) -> Examples:
        """Those of the given indices, in that order."""
        return Examples(self.classes[chosen], lambda indices: self.pixels(chosen[indices]))


def of_arrays(pixels: Pixels, classes: Indices) -> Examples:
    """Examples that lie in memory."""
    return Examples(classes, lambda indices: pixels[indices])


def of_folder(folder: Path, size: int) -> tuple[tuple[str, ...], Examples]:
    """The labels, sorted, and the examples of `folder`/LABEL/*.jpg|png; files are decoded when they are asked for.

    Raises InvalidInputError for fewer than two labels or a label without images, later for a file that is no image.
    """
    labels = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
    if len(labels) < 2:
        raise InvalidInputError("data", str(folder), "a folder with a sub-folder of images for each label, two or more")
    files: list[Path] = []
    classes: list[int] = []
    for index, label in enumerate(labels):
        own = sorted(path for path in (folder / label).iterdir() if path.suffix.lower() in _SUFFIXES)
        if len(own) < HELD_OUT:
            raise InvalidInputError("data", str(folder / label), f"at least {HELD_OUT} images (JPEG or PNG)")
        files += own
        classes += [index] * len(own)

    def pixels(indices: Indices) -> Pixels:
        return np.stack([_decoded(files[index], size) for index in indices])

    return labels, Examples(np.array(classes, dtype=np.int64), pixels)


def split(examples: Examples) -> tuple[Examples, Examples]:
    """Four fifths for training and one for the profile, of every label alike; the same examples each time."""
    held = np.zeros(len(examples), dtype=bool)
    for label in np.unique(examples.classes):
        own = np.flatnonzero(examples.classes == label)
        held[np.random.default_rng(int(label)).permutation(own)[: max(1, len(own) // HELD_OUT)]] = True
    return examples.part(np.flatnonzero(~held)), examples.part(np.flatnonzero(held))


def _decoded(file: Path, size: int) -> Pixels:
    try:
        return decode(file.read_bytes(), size, _MAX_PIXELS)
    except InvalidInputError as error:
        raise InvalidInputError("data", f"{file.parent.name}/{file.name}", str(error)) from None
