"""Images of every kind become the squares that transformers' processors and timm's transform make of them."""

from __future__ import annotations

import importlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shapeshift.token_adapt.checkpoints.processors import read_processor
from shapeshift.token_adapt.checkpoints.timm import _preprocessing
from shapeshift.token_adapt.image_decoding import decode
from shapeshift.token_adapt.model.manifest import Preprocessing

MOST = 1_000_000
ORIENTATION = 0x0112
CROPPED = {"crop_size": {"height": 32, "width": 32}}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit.image_processing_pil_vit", {"size": {"height": 32, "width": 32}}),
    "DeiT": (
        "deit.image_processing_pil_deit",
        {"size": {"height": 41, "width": 41}, **CROPPED},
    ),
    "Bit": ("bit.image_processing_pil_bit", {"size": {"shortest_edge": 37}, **CROPPED}),
    "CLIP": (
        "clip.image_processing_pil_clip",
        {"size": {"shortest_edge": 32}, **CROPPED},
    ),
    "Siglip": ("siglip.image_processing_pil_siglip", {"size": {"height": 32, "width": 32}, "resample": 2}),
}
TIMM: list[dict[str, Any]] = [
    {},
    {"crop_pct": 0.9, "interpolation": "bilinear"},
    {"crop_pct": 0.95, "crop_mode": "squash"},
    {"crop_pct": 1.0, "crop_mode": "border", "mean": [0.2, 0.4, 0.6]},
]


def picture(height: int = 75, width: int = 58) -> Image.Image:
    """Smooth shapes with noise over them."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [120 + 100 * np.sin(rows / (7 + 3 * colour) + columns / (11 - 2 * colour)) for colour in range(3)]
    noise = np.random.default_rng(0).normal(0, 15, (height, width, 3))
    return Image.fromarray(np.clip(np.stack(waves, 2) + noise, 0, 255).astype(np.uint8))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return saved(picture(), "JPEG", exif=exif)


def palette() -> bytes:
    return saved(picture().quantize(16), "PNG", transparency=3)


def with_alpha(mode: str) -> bytes:
    image = picture().convert(mode)
    image.putalpha(Image.fromarray(np.tile(np.arange(58, dtype=np.uint8) * 4, (75, 1))))
    return saved(image, "PNG")


FILES: dict[str, bytes] = {
    "RGB": saved(picture(), "PNG"),
    "JPEG, large": saved(picture(400, 301), "JPEG"),
    "wide": saved(picture(33, 150), "PNG"),
    "small": saved(picture(9, 13), "PNG"),
    "grey": saved(picture().convert("L"), "PNG"),
    "grey and alpha": with_alpha("LA"),
    "RGBA": with_alpha("RGBA"),
    "palette": palette(),
    "CMYK": saved(picture().convert("CMYK"), "JPEG"),
    "black and white": saved(picture().convert("1"), "PNG"),
    "16 bits": saved(Image.fromarray(np.arange(75 * 58, dtype=np.uint16).reshape(75, 58) % 300), "PNG"),
    "turned": turned(),
}


def upright(data: bytes) -> Image.Image:
    image: Image.Image = Image.open(io.BytesIO(data))
    if image.getexif().get(ORIENTATION) == 6:
        image = image.transpose(Image.Transpose.ROTATE_270)
    return image


def assert_equal(got: np.ndarray, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape and got.dtype == np.uint8
    assert np.abs(got.astype(float) - wanted).max() <= 1 + 1e-4


@pytest.mark.parametrize("name", PROCESSORS)
def test_files_are_processed_as_by_transformers(tmp_path: Path, name: str) -> None:
    module, stated = PROCESSORS[name]
    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), f"{name}ImageProcessorPil")(**stated)
    theirs.save_pretrained(tmp_path)
    ours = read_processor(tmp_path, "ViT")
    # The defaults of the class hold where the file is silent.
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
    assert read_processor(tmp_path, name) == ours
    for data in FILES.values():
        image = upright(data)
        if not theirs.do_convert_rgb:
            # These processors take RGB only; the library's own pipelines convert before.
            image = image.convert("RGB")
        normal = np.asarray(theirs(image)["pixel_values"][0]).transpose(1, 2, 0)
        assert_equal(decode(data, ours.preprocessing, MOST), 255 * (normal * np.array(ours.std) + np.array(ours.mean)))


@pytest.mark.parametrize("stated", TIMM, ids=["default", "centre", "squash", "border"])
def test_files_are_processed_as_by_timm(stated: dict[str, Any]) -> None:
    ours = _preprocessing(stated, 32)
    for data in FILES.values():
        assert_equal(decode(data, ours, MOST), by_timm(upright(data).convert("RGB"), stated))


def by_timm(image: Image.Image, stated: dict[str, Any]) -> np.ndarray:
    """timm's transform for evaluation, whose torchvision is not installed: the whole image resized, then cut."""
    scale = math.floor(32 / stated.get("crop_pct", 0.875))
    width, height = image.size
    mode = stated.get("crop_mode", "center")
    if mode == "squash":
        size = (scale, scale)
    elif mode == "border":
        size = (round(width / (max(width, height) / scale)), round(height / (max(width, height) / scale)))
    else:
        size = (int(scale * width / min(width, height)), int(scale * height / min(width, height)))
    image = image.resize(size, Image.Resampling[stated.get("interpolation", "bicubic").upper()])
    around = [max(0, 32 - edge) for edge in size]
    fill = tuple(round(255 * value) for value in stated.get("mean", (0, 0, 0)))
    bordered = Image.new("RGB", (size[0] + around[0], size[1] + around[1]), fill)
    bordered.paste(image, (around[0] // 2, around[1] // 2))
    left, top = (round((edge - 32) / 2.0) for edge in bordered.size)
    return np.asarray(bordered.crop((left, top, left + 32, top + 32)))


def test_transparent_parts_are_white_only_where_the_processor_makes_them_so() -> None:
    image = Image.new("RGBA", (32, 32), (10, 20, 30, 0))
    data = saved(image, "PNG")
    assert decode(data, Preprocessing(32, on_white=True), MOST)[0, 0].tolist() == [255, 255, 255]
    assert decode(data, Preprocessing(32), MOST)[0, 0].tolist() == [10, 20, 30]


def test_a_very_long_image_costs_no_memory() -> None:
    """Resized as a whole it would have 32 x 1,600,000 pixels."""
    data = saved(Image.new("L", (1, 50_000), 77), "PNG")
    assert decode(data, Preprocessing(32), MOST).tolist() == np.full((32, 32, 3), 77).tolist()
