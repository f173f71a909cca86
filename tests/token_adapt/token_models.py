"""Image models, images and requests for tests."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format
from PIL import Image

from shapeshift.serving import model_args
from shapeshift.serving.model_args import ModelArgs
from shapeshift.token_adapt.front import ImageFront
from shapeshift.token_adapt.model.manifest import Preprocessing
from shapeshift.token_adapt.policy.costs import GammaProfile
from shapeshift.token_adapt.request import Task
from shapeshift.token_adapt.settings import signature
from shapeshift.triton import model_config
from tests.fakes import PbUtils, Request, as_served

PROJECT = Path(__file__).resolve().parents[2]
OUTPUTS = ("LABEL", "PROBABILITIES", "GAMMA", "BATCH_SIZE", "OUTCOME")
SIZE = 8
# Longer than any wait of the tests: a request with this latency is in time.
LONG_MS = 600_000


def profile(gamma: int, factor: float = 1.0) -> GammaProfile:
    """About 0.9 ms per batch and 0.1 ms per image, times `factor`."""
    return GammaProfile(gamma, 16 + gamma, {1: 1.0 * factor, 64: 7.4 * factor}, 1.0)


PROFILES = {-4: profile(-4, 0.5), 0: profile(0), 2: profile(2, 1.5)}
TASKS = {
    "animals": Task("animals", ("cat", "dog"), {-4: 0.6, 0: 0.8, 2: 0.9}, LONG_MS, 1.0),
    "digits": Task("digits", tuple("0123456789"), {-4: 0.9, 0: 0.95, 2: 0.95}, LONG_MS, 0.5),
}


class RecordingModel:
    """A model that predicts the first pixel of each image and records its runs; each run first calls `before`."""

    def __init__(self, before: Callable[[int, int], None] = lambda gamma, count: None) -> None:
        self.preprocessing = Preprocessing(SIZE)
        self.profiles: Mapping[int, GammaProfile] = PROFILES
        self.gammas = tuple(sorted(PROFILES))
        self.tasks: Mapping[str, Task] = dict(TASKS)
        self.runs: list[tuple[int, list[int], list[str]]] = []
        self.messages: list[str] = []
        self._before = before

    def run(self, gamma: int, pixels: np.ndarray, tasks: Sequence[Task]) -> Sequence[np.ndarray]:
        assert pixels.dtype == np.uint8 and pixels.shape == (len(tasks), SIZE, SIZE, 3)
        self.runs.append((gamma, pixels[:, 0, 0, 0].tolist(), [task.name for task in tasks]))
        self._before(gamma, len(pixels))
        shades = pixels[:, 0, 0, 0].tolist()
        return [self._answer(shade, task) for shade, task in zip(shades, tasks, strict=True)]

    def reload_tasks(self) -> list[str]:
        messages, self.messages = self.messages, []
        return messages

    def _answer(self, shade: int, task: Task) -> np.ndarray:
        labels = len(task.labels)
        found = np.zeros(labels, np.float32)
        found[shade % labels] = 1.0
        return found


class Gate:
    """Blocks every run until `opened` is set; `entered` is set when a run starts."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, gamma: int, count: int) -> None:
        self.entered.set()
        assert self.opened.wait(120)


def arguments(**parameters: object) -> ModelArgs:
    """The arguments that Triton gives the backend for `classify_image`, with other parameters."""
    config = model_config.read(PROJECT / "model_repository" / "classify_image" / "config.pbtxt")
    del config.parameters["checkpoint"], config.parameters["precision"], config.parameters["task"]
    for name, value in parameters.items():
        model_config.set_parameter(config, name, str(value))
    config = model_config.complete(config, signature({}))
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
    """A front with this model."""
    return as_served(ImageFront(pb_utils or PbUtils(), arguments(**parameters), lambda args, own: model))


def square(shade: int, size: int = SIZE) -> np.ndarray:
    """An image of one shade of grey."""
    return np.full((size, size, 3), shade, np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    """An image file; [h, w] becomes greyscale, four channels RGBA."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def pixels_request(*shades: int, size: int = SIZE, **parameters: Any) -> Request:
    """A request with one grey image per shade as PIXELS; the default task is animals."""
    given = {"task": "animals", **parameters}
    return Request(OUTPUTS, given, PIXELS=np.stack([square(shade, size) for shade in shades]))


def files_request(*files: bytes, **parameters: Any) -> Request:
    """A request with image files as IMAGE [n, 1]; the default task is animals."""
    given = {"task": "animals", **parameters}
    return Request(OUTPUTS, given, IMAGE=np.array([[data] for data in files], dtype=object))
