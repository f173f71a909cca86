"""Decodes the images of clients to the square input of the model, as the model's own library does; and its threads."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from shapeshift.errors import InvalidInputError
from shapeshift.serving.bounds import require_deadline, unloading
from shapeshift.serving.liveness import StepCounter
from shapeshift.token_adapt.executor import Executor
from shapeshift.token_adapt.model.manifest import Preprocessing
from shapeshift.token_adapt.request import ImageRequest, Pixels

FORMATS = ("JPEG", "PNG")
_CHANNELS = 3
# Of an image's longer edge to its shorter one, as far as it matters for the centre.
_LONGEST = 16
_WHITE = (255, 255, 255, 255)
_SMOOTHING = 0.1

Decode = Callable[[int], Pixels]


class DecoderPool:
    """The threads that decode images, in order of arrival, and hand decoded requests to the executor.

    image_ms: mean time of recent images; 0 before the first. steps: images that have been decoded.
    """

    def __init__(self, threads: int, executor: Executor) -> None:
        self.image_ms = 0.0
        self._num_threads = threads
        self._executor = executor
        self._num_waiting = 0
        self.steps = StepCounter("decode", lambda: self._num_waiting > 0)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, "decode")

    def submit(self, request: ImageRequest, decode: Decode) -> None:
        """Decode the images of a request; decode(row) returns one. Never blocks.

        Raises OverloadedError where images wait and the request would miss its deadline, and after `close`.
        """
        with self._lock:
            if self._num_waiting:
                require_deadline(self._predicted_ms(request), request.options.latency_ms)
            self._num_waiting += request.num_images
        try:
            self._threads.submit(self._run, request, decode)
        except RuntimeError:
            raise unloading() from None

    def close(self) -> None:
        """Decode what waits, then end the threads."""
        self._threads.shutdown()

    def _predicted_ms(self, request: ImageRequest) -> float:
        waiting_ms = self._num_waiting * self.image_ms / self._num_threads
        return waiting_ms + request.num_images * self.image_ms + self._executor.usual_ms

    def _run(self, request: ImageRequest, decode: Decode) -> None:
        pixels = []
        try:
            for row in range(request.num_images):
                if request.cancelled or not self._executor.can_meet(request.deadline):
                    self._executor.submit(request, None)
                    return
                began = time.monotonic()
                pixels.append(decode(row))
                took_ms = (time.monotonic() - began) * 1e3
                with self._lock:
                    self.steps.step()
                self.image_ms += (_SMOOTHING if self.image_ms else 1.0) * (took_ms - self.image_ms)
        except Exception as error:  # noqa: BLE001  an invalid image fails its own request only
            request.fail(error)
        else:
            self._executor.submit(request, pixels)
        finally:
            with self._lock:
                self._num_waiting -= request.num_images
                self.steps.step()


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
