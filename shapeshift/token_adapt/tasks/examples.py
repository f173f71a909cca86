"""Labelled images for training and profiling a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.image_decoding import decode
from shapeshift.token_adapt.model.manifest import Preprocessing
from shapeshift.token_adapt.request import Pixels

Indices = NDArray[np.int64]

FILE = "examples.npz"
# One image in five is held out for the profile (section II-B).
HELD_OUT = 5
SUFFIXES = (".jpg", ".jpeg", ".png")
_MAX_PIXELS = 100_000_000
_MAX_KEPT = 512


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


def from_folder(folder: Path, preprocessing: Preprocessing) -> tuple[tuple[str, ...], Examples]:
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
        images = sorted(path for path in (folder / label).iterdir() if path.suffix.lower() in SUFFIXES)
        if len(images) < HELD_OUT:
            raise InvalidInputError("data", str(folder / label), f"at least {HELD_OUT} images (JPEG or PNG)")
        files += images
        classes += [index] * len(images)

    def pixels(indices: Indices) -> Pixels:
        return np.stack([_decoded(files[index], preprocessing) for index in indices])

    return labels, Examples(np.array(classes, dtype=np.int64), pixels)


def to_file(folder: Path, examples: Examples) -> None:
    """Keep examples, evenly spread and at most 512, in `folder`: builds verify engines with them."""
    chosen = np.linspace(0, len(examples) - 1, min(len(examples), _MAX_KEPT)).astype(np.int64)
    np.savez_compressed(folder / FILE, pixels=examples.pixels(chosen), classes=examples.classes[chosen])


def from_file(folder: Path) -> Examples | None:
    """The examples that `to_file` kept in `folder`; None without. Raises InvalidInputError for an unreadable file."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as arrays:
            pixels, classes = arrays["pixels"], arrays["classes"].astype(np.int64)
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise InvalidInputError(FILE, str(file), f"arrays pixels and classes ({error})") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or len(pixels) != len(classes) or not len(classes):
        raise InvalidInputError(FILE, [pixels.dtype, *pixels.shape], "uint8 [n, size, size, 3], a class for each")
    return from_arrays(pixels, classes)


def split(examples: Examples) -> tuple[Examples, Examples]:
    """Four fifths of each label for training and one for the profile; deterministic."""
    held_out = np.zeros(len(examples), dtype=bool)
    for label in np.unique(examples.classes):
        images = np.flatnonzero(examples.classes == label)
        shuffled = np.random.default_rng(int(label)).permutation(images)
        held_out[shuffled[: max(1, len(images) // HELD_OUT)]] = True
    return examples.subset(np.flatnonzero(~held_out)), examples.subset(np.flatnonzero(held_out))


def _decoded(file: Path, preprocessing: Preprocessing) -> Pixels:
    try:
        return decode(file.read_bytes(), preprocessing, _MAX_PIXELS)
    except InvalidInputError as error:
        raise InvalidInputError("data", f"{file.parent.name}/{file.name}", str(error)) from None
