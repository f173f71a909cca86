"""What the build checks of a model before it builds anything."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from shapeshift.build_engines import cascade, decode
from shapeshift.build_engines.image import front as image_front
from shapeshift.build_engines.image.plan import EmulatedFrontConfig, ImageFrontConfig
from shapeshift.build_engines.model_folder import CONFIG
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import read, required_models
from shapeshift.build_engines.text import front as text_front
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.workers import check_name
from shapeshift.errors import NotFoundError

# Each publisher of these begins with the same check.
_CHECKS: dict[type, Callable[[Any, BuildPaths], Any]] = {
    TextFrontConfig: text_front.check,
    decode.DecodeFrontConfig: decode.check,
    ImageFrontConfig: image_front.check,
    EmulatedFrontConfig: image_front.check_emulated,
    cascade.CascadeFrontConfig: cascade.check,
}


def validate(name: str, fronts: Collection[str], paths: BuildPaths) -> Any:
    """Raise the error with which `make engines` would refuse the model `name` before it builds anything.

    fronts: the names of all front models of the repository. Returns what the check of its technique found.
    """
    check_name(name, fronts)
    front = read(paths.repository / name)
    found = _CHECKS[type(front)](front, paths)
    for required in required_models(front, paths):
        if required not in fronts:
            raise NotFoundError(f"needs the model {required}: no {paths.repository / required / CONFIG}")
    return found
