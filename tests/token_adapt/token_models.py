"""Image models, images and requests of the tests."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format
from PIL import Image

from shapeshift.serving import model_args
from shapeshift.serving.model_args import ModelArgs
from shapeshift.token_adapt.front import ImageFront
from shapeshift.token_adapt.interfaces import GammaProfile, Task
from shapeshift.triton import modelconfig
from tests.fakes import PbUtils, Request

PROJECT = Path(__file__).resolve().parents[2]
OUTPUTS = ("LABEL", "PROBABILITIES", "GAMMA", "BATCH_SIZE", "OUTCOME")
SIZE = 8
# Nothing that the tests wait for takes as long: a request with it is in time.
LONG_MS = 600_000


def profile(gamma: int, factor: float = 1.0) -> GammaProfile:
    """1 ms and a tenth more for each image."""
    return GammaProfile(gamma, 16 + gamma, {1: 1.0 * factor, 64: 7.4 * factor}, 1.0)


PROFILES = {-4: profile(-4, 0.5), 0: profile(0), 2: profile(2, 1.5)}
TASKS = {
    "animals": Task("animals", ("cat", "dog"), {-4: 0.6, 0: 0.8, 2: 0.9}, LONG_MS, 1.0, 0),
    "digits": Task("digits", tuple("0123456789"), {-4: 0.9, 0: 0.95, 2: 0.95}, LONG_MS, 0.5, 1),
}


class Watched:
    """A model that answers with each image's first pixel; `before` is called at the start of every run."""

    def __init__(self, before: Callable[[int, int], None] = lambda gamma, count: None) -> None:
        self.image_size = SIZE
        self.profiles = PROFILES
        self.gammas = tuple(sorted(PROFILES))
        self.tasks = dict(TASKS)
        self.runs: list[tuple[int, list[int], list[int]]] = []
        self.messages: list[str] = []
        self._before = before

    def run(self, gamma: int, pixels: np.ndarray, task_index: np.ndarray) -> Sequence[np.ndarray]:
        assert pixels.dtype == np.uint8 and pixels.shape == (len(task_index), SIZE, SIZE, 3)
        assert task_index.dtype == np.int32
        self.runs.append((gamma, pixels[:, 0, 0, 0].tolist(), task_index.tolist()))
        self._before(gamma, len(pixels))
        shades = pixels[:, 0, 0, 0].tolist()
        return [self._answer(shade, index) for shade, index in zip(shades, task_index.tolist(), strict=True)]

    def reload_tasks(self) -> list[str]:
        said, self.messages = self.messages, []
        return said

    def _answer(self, shade: int, index: int) -> np.ndarray:
        labels = len(next(task for task in TASKS.values() if task.index == index).labels)
        found = np.zeros(labels, np.float32)
        found[shade % labels] = 1.0
        return found


class Gate:
    """Holds every run until it is opened; `entered` is set when one has begun."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, gamma: int, count: int) -> None:
        self.entered.set()
        assert self.opened.wait(60)


def arguments(**parameters: object) -> ModelArgs:
    """What Triton tells the backend about `classify_image`, with other parameters."""
    config = modelconfig.read(PROJECT / "model_repository" / "classify_image" / "config.pbtxt")
    del config.parameters["checkpoint"], config.parameters["precision"], config.parameters["task"]
    for name, value in parameters.items():
        modelconfig.set_parameter(config, name, str(value))
    return model_args.read(
        {
            "model_config": json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)),
            "model_name": "classify_image",
            "model_repository": str(PROJECT / "model_repository" / "classify_image"),
            "model_version": "1",
            "model_instance_name": "classify_image_0",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )


def front(model: Any, pb_utils: PbUtils | None = None, **parameters: object) -> ImageFront:
    """The front over a model of the tests."""
    return ImageFront(pb_utils or PbUtils(), arguments(**parameters), lambda args, own: model)


def square(shade: int, size: int = SIZE) -> np.ndarray:
    """One image of one grey."""
    return np.full((size, size, 3), shade, np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    """The file of an image; [h, w] becomes greyscale, four channels RGBA."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def pixels_request(*shades: int, size: int = SIZE, **parameters: Any) -> Request:
    """A request of images of one grey each, as PIXELS; `task` is animals unless it says otherwise."""
    given = {"task": "animals", **parameters}
    return Request(OUTPUTS, given, PIXELS=np.stack([square(shade, size) for shade in shades]))


def files_request(*files: bytes, **parameters: Any) -> Request:
    """The same of image files, as IMAGE [n, 1]."""
    given = {"task": "animals", **parameters}
    return Request(OUTPUTS, given, IMAGE=np.array([[data] for data in files], dtype=object))
