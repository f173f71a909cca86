"""CIFAR-10 from its JPEG files, and scikit-learn's digits drawn on images of the same size."""

from __future__ import annotations

import os
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

SIZE = 32
ARCHIVE = "cifar10_jpeg.tar.xz"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar(cache: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Images uint8 [n, 32, 32, 3] and classes int64 [n] of "train" and "test"; decoded once into the file `cache`."""
    if not cache.is_file():
        cache.parent.mkdir(parents=True, exist_ok=True)
        archive = Path(os.environ.get("SHAPESHIFT_DATA", ".")) / ARCHIVE
        if not archive.is_file():
            raise SystemExit(f"no {archive}: set SHAPESHIFT_DATA to the folder that holds {ARCHIVE}")
        _decode(archive, cache)
    arrays = np.load(cache)
    return {
        part: (torch.from_numpy(arrays[f"{part}_images"]), torch.from_numpy(arrays[f"{part}_classes"]))
        for part in ("train", "test")
    }


def _decode(archive: Path, cache: Path) -> None:
    images: dict[str, list[tuple[str, np.ndarray]]] = {"train": [], "test": []}
    with tarfile.open(archive) as files:
        for member in files:
            stream = files.extractfile(member) if member.name.endswith(".jpg") else None
            if stream:
                part, name = member.name.split("/")[:2]
                images[part].append((name, np.asarray(Image.open(BytesIO(stream.read())).convert("RGB"))))
    arrays = {}
    for part, entries in images.items():
        arrays[f"{part}_images"] = np.stack([pixels for _, pixels in entries])
        arrays[f"{part}_classes"] = np.array([CLASSES.index(name) for name, _ in entries])
    np.savez(cache, **arrays)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's 1,797 digits, 8 x 8 in 17 shades, as uint8 [n, 32, 32, 3], and their int64 classes."""
    from sklearn.datasets import load_digits

    dataset = load_digits()
    shades = (dataset.images * (255 / 16)).round().astype(np.uint8)
    enlarged = [Image.fromarray(one).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for one in shades]
    return np.stack([np.asarray(one.convert("RGB")) for one in enlarged]), dataset.target.astype(np.int64)
