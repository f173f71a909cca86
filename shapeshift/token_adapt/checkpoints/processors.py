"""transformers' image processors: what preprocessor_config.json states, and each class's defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.checkpoints.description import three_numbers
from shapeshift.token_adapt.model.manifest import Preprocessing

# The first that a folder has; the second has the processor as one field of several.
FILES = ("preprocessor_config.json", "processor_config.json")
_NESTED = "image_processor"
_SUFFIXES = ("Pil", "Fast", "ImageProcessor", "FeatureExtractor")

_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_IMAGENET_COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_COMMON = {
    "do_resize": True,
    "do_center_crop": False,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": False,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
}
_SHORTEST: dict[str, Any] = {
    **_COMMON,
    **_CLIP_COLOURS,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_convert_rgb": True,
}
# By the name of the class without its suffix. A size that is one number is a square, or with `one_is_shortest` the
# shortest edge.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {**_COMMON, "size": {"height": 224, "width": 224}, "resample": 2},
    "DeiT": {
        **_COMMON,
        "size": {"height": 256, "width": 256},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
    },
    "Bit": _SHORTEST,
    "CLIP": _SHORTEST,
    "DINOv3ViT": {**_COMMON, **_IMAGENET_COLOURS, "size": {"height": 224, "width": 224}, "resample": 2},
    "Siglip": {**_COMMON, "size": {"height": 224, "width": 224}, "do_convert_rgb": True},
}
_ONE_IS_SHORTEST = ("Bit", "CLIP", "Siglip")


@dataclass(frozen=True)
class Processor:
    """What the file `file` states: how images become squares, and the mean and deviation of pixels in 0..1."""

    file: str
    preprocessing: Preprocessing
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def processor_file(folder: Path) -> str:
    """The file with the image processor's settings. Raises InvalidInputError where `folder` has none."""
    for name in FILES:
        if (folder / name).is_file():
            return name
    raise InvalidInputError(
        "checkpoint", str(folder), f"must hold {FILES[0]}: size and colours of its images; download it again"
    )


def read_processor(folder: Path, kind: str) -> Processor:
    """The processor of `folder`; kind: its class where it names none. Raises coded errors naming file and field."""
    name = processor_file(folder)
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        content = content[_NESTED] if name == FILES[1] else content
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError("checkpoint", str(folder / name), f"JSON of an image processor ({error})") from None
    if not isinstance(content, dict):
        raise InvalidInputError("checkpoint", str(folder / name), "a JSON object")
    kind = str(content.get("image_processor_type") or content.get("feature_extractor_type") or kind)
    for suffix in _SUFFIXES:
        kind = kind.removesuffix(suffix)
    if kind not in _DEFAULTS:
        raise UnsupportedError(f"{name}: image_processor_type: got {kind!r}; supported: {', '.join(_DEFAULTS)}")
    config = _DEFAULTS[kind] | {key: value for key, value in content.items() if value is not None}
    scale = _scale(name, config)
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if config["do_normalize"]:
        mean, std = (three_numbers(f"{name}: image_{key}", config[f"image_{key}"]) for key in ("mean", "std"))
    mean, std = ((one[0] * scale, one[1] * scale, one[2] * scale) for one in (mean, std))
    return Processor(name, _geometry(name, kind, config), mean, std)


def _scale(name: str, config: Mapping[str, Any]) -> float:
    """What pixels in 0..1 are multiplied by when normalised values are compared with theirs."""
    if not config["do_rescale"]:
        return 1 / 255
    factor = config["rescale_factor"]
    if not isinstance(factor, int | float) or factor <= 0:
        raise InvalidInputError(f"{name}: rescale_factor", factor, "a number above 0")
    return 1 / (255 * factor)


def _geometry(name: str, kind: str, config: Mapping[str, Any]) -> Preprocessing:
    if not config["do_resize"]:
        raise UnsupportedError(f"{name}: do_resize: got False; the model takes images of one size, set it to true")
    resample = config["resample"]
    if not isinstance(resample, int) or resample not in [*Image.Resampling]:
        raise InvalidInputError(f"{name}: resample", resample, "0 to 5, one of Pillow's filters")
    edge, resized = _size(f"{name}: size", config["size"], "shortest" if kind in _ONE_IS_SHORTEST else "both")
    size = resized
    if config["do_center_crop"]:
        # Its size may be one number, which is a square in every class.
        _, size = _size(f"{name}: crop_size", config.get("crop_size", config["size"]), "both")
    elif edge != "both":
        raise UnsupportedError(f"{name}: size: got the shortest edge without do_center_crop; images must become square")
    if size > resized:
        raise UnsupportedError(
            f"{name}: crop_size: got {size}, larger than size, {resized}; set it to {resized} or less"
        )
    chosen = Image.Resampling(resample).name.lower()
    return Preprocessing(size, edge, resized, chosen, "down", on_white=bool(config["do_convert_rgb"]))


def _size(field: str, value: Any, one_is: str) -> tuple[str, int]:
    """Which edge is resized, and to how many pixels."""
    if isinstance(value, int) and value > 0:
        return one_is, value
    if isinstance(value, dict):
        edges = {key: edge for key, edge in value.items() if edge is not None}
        height = edges.get("height")
        if set(edges) == {"height", "width"} and height == edges["width"] and isinstance(height, int) and height > 0:
            return "both", height
        shortest = edges.get("shortest_edge")
        if set(edges) == {"shortest_edge"} and isinstance(shortest, int) and shortest > 0:
            return "shortest", shortest
    raise InvalidInputError(field, value, "height and width that are equal, or shortest_edge, in pixels")
