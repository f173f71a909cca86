"""From what clients send to the square of pixels that a model takes."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.interfaces import Pixels

FORMATS = ("JPEG", "PNG")
_CHANNELS = 3


def decode(data: bytes, size: int, max_pixels: int, row: int | None = None) -> Pixels:
    """The image in a JPEG or PNG file as uint8 [size, size, 3].

    Raises InvalidInputError naming `row` for anything else: other data, files that break off, more than `max_pixels`
    pixels (known before they are decoded), and images that are not RGB.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check(image, max_pixels, row)
            # A large JPEG is decoded at a half, a quarter or an eighth of its size, never below twice the wanted one.
            image.draft(None, (2 * size, 2 * size))
            return _square(image, size)
    except (InvalidInputError, MemoryError):
        raise
    except Image.DecompressionBombError:
        # Pillow's own limit, far above ours.
        raise InvalidInputError("image", "a decompression bomb", f"at most {max_pixels} pixels", row) from None
    except Exception as error:  # noqa: BLE001  whatever damaged files make Pillow raise, the request is answered
        what = f"{len(data)} bytes ({error or type(error).__name__})"
        raise InvalidInputError("IMAGE", what, "a whole JPEG or PNG file", row) from None


def fit(pixels: Pixels, size: int, max_pixels: int, row: int | None = None) -> Pixels:
    """Pixels [height, width, 3] as uint8 [size, size, 3]. Raises InvalidInputError naming `row`."""
    if pixels.ndim != 3 or pixels.shape[2] != _CHANNELS or 0 in pixels.shape:
        raise InvalidInputError("PIXELS", list(pixels.shape), "shape [height, width, 3], none of them 0", row)
    if pixels.shape[:2] == (size, size):
        return pixels
    image = Image.fromarray(pixels)
    _check(image, max_pixels, row)
    return _square(image, size)


def _check(image: Image.Image, max_pixels: int, row: int | None) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidInputError("image", f"{width} x {height} pixels", f"at most {max_pixels} pixels", row)
    if image.mode != "RGB":
        channels = f"mode {image.mode}, {len(image.getbands())} channel(s)"
        raise InvalidInputError("image", channels, "three channels of 8 bits: convert it to RGB", row)


def _square(image: Image.Image, size: int) -> Pixels:
    """The middle of the image, as large as its shorter side allows, resized."""
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    if image.size != (size, size):
        middle = image.crop((left, top, left + side, top + side))
        image = middle.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.uint8)
