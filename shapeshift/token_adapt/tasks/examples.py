"""Labelled images for training and profiling a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.image_decoding import decode
from shapeshift.token_adapt.interfaces import Pixels

Indices = NDArray[np.int64]

# One image in five is held out for the profile (section II-B).
HELD_OUT = 5
_SUFFIXES = (".jpg", ".jpeg", ".png")
_MAX_PIXELS = 100_000_000


@dataclass(frozen=True)
class Examples:
    """Images with their label indices; `pixels` returns uint8 [n, size, size, 3] for n image indices."""

    classes: Indices
    pixels: Callable[[Indices], Pixels]

    def __len__(self) -> int:
        return len(self.classes)

    def subset(self, chosen: Indices) -> Examples:
        """The examples with these indices, in that order."""
        return Examples(self.classes[chosen], lambda indices: self.pixels(chosen[indices]))


def from_arrays(pixels: Pixels, classes: Indices) -> Examples:
    """Examples in memory."""
    return Examples(classes, lambda indices: pixels[indices])


def from_folder(folder: Path, size: int) -> tuple[tuple[str, ...], Examples]:
    """The sorted labels, and the examples in `folder`/LABEL/*.jpg|png. Files are decoded on access.

    Raises InvalidInputError for fewer than two labels and labels with too few images; on access, for an invalid file.
    """
    labels = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir())) if folder.is_dir() else ()
    if len(labels) < 2:
        raise InvalidInputError(
            "data", str(folder), "a folder with one sub-folder of images per label, and at least two labels"
        )
    files: list[Path] = []
    classes: list[int] = []
    for index, label in enumerate(labels):
        images = sorted(path for path in (folder / label).iterdir() if path.suffix.lower() in _SUFFIXES)
        if len(images) < HELD_OUT:
            raise InvalidInputError("data", str(folder / label), f"at least {HELD_OUT} images (JPEG or PNG)")
        files += images
        classes += [index] * len(images)

    def pixels(indices: Indices) -> Pixels:
        return np.stack([_decoded(files[index], size) for index in indices])

    return labels, Examples(np.array(classes, dtype=np.int64), pixels)


def split(examples: Examples) -> tuple[Examples, Examples]:
    """Four fifths of each label for training and one for the profile; deterministic."""
    held_out = np.zeros(len(examples), dtype=bool)
    for label in np.unique(examples.classes):
        images = np.flatnonzero(examples.classes == label)
        shuffled = np.random.default_rng(int(label)).permutation(images)
        held_out[shuffled[: max(1, len(images) // HELD_OUT)]] = True
    return examples.subset(np.flatnonzero(~held_out)), examples.subset(np.flatnonzero(held_out))


def _decoded(file: Path, size: int) -> Pixels:
    try:
        return decode(file.read_bytes(), size, _MAX_PIXELS)
    except InvalidInputError as error:
        raise InvalidInputError("data", f"{file.parent.name}/{file.name}", str(error)) from None
