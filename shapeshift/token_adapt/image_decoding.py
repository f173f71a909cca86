"""Decodes the images of clients to the square input of the model, as the model's own library does."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.interfaces import Pixels, Preprocessing

FORMATS = ("JPEG", "PNG")
_CHANNELS = 3
# Of an image's longer edge to its shorter one, as far as it matters for the centre.
_LONGEST = 16
_WHITE = (255, 255, 255, 255)


def decode(data: bytes, preprocessing: Preprocessing, max_pixels: int, row: int | None = None) -> Pixels:
    """A JPEG or PNG file of any mode as uint8 RGB [size, size, 3], turned as its EXIF orientation says.

    Raises InvalidInputError naming `row` for other data, truncated files, and more than `max_pixels` pixels, checked
    before decoding.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            require_size(*image.size, max_pixels, row)
            ImageOps.exif_transpose(image, in_place=True)
            return _square(_rgb(image, preprocessing.on_white), preprocessing)
    except (InvalidInputError, MemoryError):
        raise
    except Image.DecompressionBombError:
        # Pillow's own limit, which is far above `max_pixels`.
        raise InvalidInputError("image", "a decompression bomb", f"at most {max_pixels} pixels", row) from None
    except UnidentifiedImageError:
        # Pillow's own text names the object in memory.
        raise InvalidInputError(
            "IMAGE", f"{len(data)} bytes of another format", "a complete JPEG or PNG file", row
        ) from None
    except Exception as error:  # noqa: BLE001  Pillow raises many types for damaged files
        received = f"{len(data)} bytes ({error or type(error).__name__})"
        raise InvalidInputError("IMAGE", received, "a complete JPEG or PNG file", row) from None


def fit(pixels: Pixels, preprocessing: Preprocessing, max_pixels: int, row: int | None = None) -> Pixels:
    """RGB pixels [height, width, 3] as uint8 [size, size, 3]; those that have this shape stay as they are.

    Raises InvalidInputError naming `row`.
    """
    if pixels.ndim != 3 or pixels.shape[2] != _CHANNELS or 0 in pixels.shape:
        raise InvalidInputError("PIXELS", list(pixels.shape), "shape [height, width, 3], all above 0", row)
    if pixels.shape[:2] == (preprocessing.size, preprocessing.size):
        return pixels
    require_size(pixels.shape[1], pixels.shape[0], max_pixels, row)
    return _square(Image.fromarray(pixels), preprocessing)


def require_size(width: int, height: int, max_pixels: int, row: int | None = None) -> None:
    """Raise InvalidInputError naming `row` for an image of more than `max_pixels` pixels."""
    if width * height > max_pixels:
        raise InvalidInputError("image", f"{width} x {height} pixels", f"at most {max_pixels} pixels", row)


def _rgb(image: Image.Image, on_white: bool) -> Image.Image:
    if on_white and ("A" in image.getbands() or "transparency" in image.info):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image)
    return image.convert("RGB")


def _square(image: Image.Image, preprocessing: Preprocessing) -> Pixels:
    """The image resized, and the centre of that."""
    size = preprocessing.size
    if preprocessing.edge == "shortest":
        image = _without_ends(image)
    image = image.resize(_resized(image.size, preprocessing), Image.Resampling[preprocessing.filter.upper()])
    left, top = (_margin(edge, size, preprocessing.rounding) for edge in image.size)
    image = image.crop((left, top, left + min(image.width, size), top + min(image.height, size)))
    if image.size != (size, size):
        bordered = Image.new("RGB", (size, size), preprocessing.border)
        bordered.paste(image, ((size - image.width) // 2, (size - image.height) // 2))
        image = bordered
    return np.asarray(image, dtype=np.uint8)


def _without_ends(image: Image.Image) -> Image.Image:
    """A very long image without its ends, which are far from the centre: resized, they could fill the memory."""
    longest = _LONGEST * min(image.size)
    left, top = (max(0, edge - longest) // 2 for edge in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


def _resized(size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    """Width and height after resizing an image of this width and height."""
    target = preprocessing.resized or preprocessing.size
    if preprocessing.edge == "both":
        return target, target
    if preprocessing.edge == "longest":
        width, height = (max(1, round(edge / (max(size) / target))) for edge in size)
    else:
        width, height = (int(target * edge / min(size)) for edge in size)
    return width, height


def _margin(edge: int, size: int, rounding: str) -> int:
    """Where the centre of an edge begins."""
    if edge <= size:
        return 0
    return (edge - size) // 2 if rounding == "down" else round((edge - size) / 2)
