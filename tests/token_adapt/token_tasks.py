"""Small image models with engines, and tasks for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shapeshift.build_engines.image import front as images
from shapeshift.build_engines.image import plan
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines.checkpoint import open_checkpoint
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks import registry, writing
from shapeshift.token_adapt.tasks.training import TrainedTask
from shapeshift.triton import model_config
from tests.token_adapt.timm_models import small_checkpoint

DEPTH, WIDTH = 2, 16
GAMMAS = (-5, 0, 2)
CONFIG = 'backend: "token_adapt" max_batch_size: 64'
STATED = {
    "checkpoint": "small",
    "provider": "openvino",
    "precision": "f32",
    "gammas": ",".join(map(str, GAMMAS)),
    "threads": "1",
    "tasks_dir": "tasks",
}


def paths(root: Path) -> BuildPaths:
    return BuildPaths(root, root / "build", root / "model_repository")


def front(root: Path, **parameters: str) -> plan.ImageFrontConfig:
    """An image front over a small checkpoint; creates both if missing."""
    if not (root / "checkpoints" / "small").is_dir():
        small_checkpoint(root / "checkpoints" / "small")
    folder = root / "model_repository" / "classify_image"
    folder.mkdir(parents=True, exist_ok=True)
    (root / STATED["tasks_dir"]).mkdir(exist_ok=True)
    values = {**STATED, **parameters}
    (folder / "config.pbtxt").write_text(CONFIG)
    config = model_config.read(folder / "config.pbtxt")
    for name, value in values.items():
        model_config.set_parameter(config, name, value)
    model_config.write(config, folder / "config.pbtxt")
    read = images.read(folder, config, values)
    assert isinstance(read, plan.ImageFrontConfig)
    return read


def backbone(root: Path) -> str:
    return open_checkpoint(root / "checkpoints" / "small", ("config.json",)).sha256


def write_task(root: Path, name: str, labels: int, seed: int = 0) -> Path:
    """A task with random prompts and heads, and a profile."""
    torch.manual_seed(seed)
    folder = root / "tasks" / name
    prompts = {gamma: torch.randn(DEPTH, gamma, WIDTH) for gamma in GAMMAS if gamma > 0}
    heads = {gamma: (torch.randn(labels, WIDTH), torch.randn(labels)) for gamma in GAMMAS}
    description = {
        "name": name,
        "labels": [f"{name} {index}" for index in range(labels)],
        "backbone": backbone(root),
        "latency_ms": 250.0,
        "utility": 0.5,
    }
    writing.write_task(folder, description, TrainedTask(prompts, heads))
    profile = {"accuracy": {str(gamma): 0.5 + gamma / 100 for gamma in GAMMAS}}
    writing.write_object(folder / task_folder.PROFILE_FILE, profile)
    return folder


def register(root: Path, name: str) -> None:
    folder = root / "tasks" / name
    registry.add(root / "tasks", registry.TaskEntry(name, folder, task_folder.sha256(folder)))


def noise(count: int, size: int = 32) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
