"""Decodes the images of clients to the square input of the model."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.interfaces import Pixels

FORMATS = ("JPEG", "PNG")
_CHANNELS = 3


def decode(data: bytes, size: int, max_pixels: int, row: int | None = None) -> Pixels:
    """A JPEG or PNG file as uint8 [size, size, 3].

    Raises InvalidInputError naming `row` for other data, truncated files, more than `max_pixels` pixels (checked
    before decoding), and images that are not RGB.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image, max_pixels, row)
            # Decodes a large JPEG at 1/2, 1/4 or 1/8 of its size, but at least at twice the target size.
            image.draft(None, (2 * size, 2 * size))
            return _square(image, size)
    except (InvalidInputError, MemoryError):
        raise
    except Image.DecompressionBombError:
        # Pillow's own limit, which is far above `max_pixels`.
        raise InvalidInputError("image", "a decompression bomb", f"at most {max_pixels} pixels", row) from None
    except Exception as error:  # noqa: BLE001  Pillow raises many types for damaged files
        given = f"{len(data)} bytes ({error or type(error).__name__})"
        raise InvalidInputError("IMAGE", given, "a complete JPEG or PNG file", row) from None


def fit(pixels: Pixels, size: int, max_pixels: int, row: int | None = None) -> Pixels:
    """Pixels [height, width, 3] as uint8 [size, size, 3]. Raises InvalidInputError naming `row`."""
    if pixels.ndim != 3 or pixels.shape[2] != _CHANNELS or 0 in pixels.shape:
        raise InvalidInputError("PIXELS", list(pixels.shape), "shape [height, width, 3], all above 0", row)
    if pixels.shape[:2] == (size, size):
        return pixels
    image = Image.fromarray(pixels)
    _check(image, max_pixels, row)
    return _square(image, size)


def require_size(width: int, height: int, max_pixels: int, row: int | None = None) -> None:
    """Raise InvalidInputError naming `row` for an image of more than `max_pixels` pixels."""
    if width * height > max_pixels:
        raise InvalidInputError("image", f"{width} x {height} pixels", f"at most {max_pixels} pixels", row)


def _check(image: Image.Image, max_pixels: int, row: int | None) -> None:
    require_size(*image.size, max_pixels, row)
    if image.mode != "RGB":
        channels = f"mode {image.mode}, {len(image.getbands())} channel(s)"
        raise InvalidInputError("image", channels, "three channels of 8 bits; convert it to RGB", row)


def _square(image: Image.Image, size: int) -> Pixels:
    """The largest centred square of the image, resized."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    if image.size != (size, size):
        square = image.crop((left, top, left + side, top + side))
        image = square.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.uint8)
