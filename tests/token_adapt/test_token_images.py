"""Decoding of client images, and refusal of invalid ones."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.image_decoding import decode, fit
from shapeshift.token_adapt.model.manifest import Preprocessing
from tests.token_adapt.token_models import encoded

MOST = 1_000_000
SQUARE = Preprocessing(32)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_an_image_of_the_right_size_is_unchanged() -> None:
    pixels = noise(32, 32)
    assert np.array_equal(decode(encoded(pixels), SQUARE, MOST), pixels)
    assert np.array_equal(fit(pixels, SQUARE, MOST), pixels)


def test_a_jpeg_is_nearly_unchanged() -> None:
    pixels = np.full((64, 64, 3), (200, 80, 20), np.uint8)
    found = decode(encoded(pixels, "JPEG"), SQUARE, MOST)
    assert found.shape == (32, 32, 3) and found.dtype == np.uint8
    assert np.abs(found.astype(int) - pixels[:32, :32]).max() < 8


def test_the_centre_is_cropped_and_resized() -> None:
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = (10, 200, 90)
    for found in (decode(encoded(pixels), Preprocessing(10), MOST), fit(pixels, Preprocessing(10), MOST)):
        assert found.shape == (10, 10, 3)
        assert np.array_equal(found[5, 5], [10, 200, 90])
        # The interpolation reads a little beyond the centre.
        assert found[:, 1:-1, 1].min() >= 200


def test_files_and_pixels_are_resized_alike() -> None:
    pixels = noise(50, 41)
    assert np.array_equal(decode(encoded(pixels), SQUARE, MOST), fit(pixels, SQUARE, MOST))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        b"GIF89a" + bytes(100),
        b"\xff\xd8\xff",
        encoded(noise(64, 64), "JPEG")[:900],
        encoded(noise(64, 64))[:900],
        encoded(noise(64, 64)).replace(b"IDAT", b"IDAX"),
    ],
    ids=["nothing", "text", "gif", "start", "short jpeg", "short png", "png without data"],
)
def test_data_that_is_not_a_complete_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError, match="row 3: IMAGE: got .*a complete JPEG or PNG file") as refused:
        decode(data, SQUARE, MOST, row=3)
    assert f"{len(data)} bytes" in str(refused.value) and "object at" not in str(refused.value)


def test_a_bomb_is_refused_by_its_header() -> None:
    """A PNG with a header of 60000 x 60000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
    with pytest.raises(InvalidInputError, match="a decompression bomb.; at most 1000000 pixels"):
        decode(data, SQUARE, MOST)
    with pytest.raises(InvalidInputError, match="1001 x 1000 pixels.; at most 1000000 pixels"):
        decode(encoded(np.zeros((1000, 1001, 3), np.uint8)), SQUARE, MOST)
    with pytest.raises(InvalidInputError, match="1001 x 1000 pixels"):
        fit(np.zeros((1000, 1001, 3), np.uint8), SQUARE, MOST)


def test_a_bomb_in_a_text_chunk_is_refused() -> None:
    file = io.BytesIO()
    from PIL import PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("note", "a" * (64 << 20), zip=True)
    Image.new("RGB", (32, 32)).save(file, "PNG", pnginfo=info)
    with pytest.raises(InvalidInputError, match="IMAGE"):
        decode(file.getvalue(), SQUARE, MOST)


def test_pixels_of_a_wrong_shape_are_refused() -> None:
    for shape in ((0, 5, 3), (5, 0, 3), (5, 5)):
        with pytest.raises(InvalidInputError, match="PIXELS"):
            fit(np.zeros(shape, np.uint8), SQUARE, MOST, row=0)
