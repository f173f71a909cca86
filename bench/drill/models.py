"""The drill's own build folder: its models, registries and backends. It shares nothing that it changes with others."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from bench.common.models import SHIPPED, write_front
from bench.common.output import BUILD
from shapeshift import installation
from shapeshift.cli import engines
from shapeshift.errors import EngineError

FOLDER = BUILD / "drill"
REPOSITORY = FOLDER / "repository"
BACKENDS = FOLDER / "backends"
ENGINES = FOLDER / "engines"
ADAPTERS = FOLDER / "adapters" / "generate_lora"
TASKS = FOLDER / "tasks"
CANDIDATES = FOLDER / "candidates"
LEVEL = "classify_text_large"
WITH_WORKERS = "encode_workers"
WORKERS = 2

_SOURCE = FOLDER / "model_repository"
# The drill's clients give up after 20 s, so that a fault's queue must not last longer.
_PATIENCE = {"max_queue_ms": "2000"}
# In f32 a greedy text does not depend on the other rows of a batch.
_CHANGES: dict[str, dict[str, str]] = {
    "generate": {"precision": "f32"},
    "generate_lora": {"precision": "f32"},
    # The small one: its engines are built in seconds, and a drill asks for many images.
    "classify_image": {
        "checkpoint": "cifar-vit",
        "gammas": "-7,0,2",
        "tasks_dir": str(TASKS.resolve()),
    },
    "encode": _PATIENCE,
    LEVEL: _PATIENCE,
    "classify_text": {"candidates_dir": str(CANDIDATES.resolve()), **_PATIENCE},
    WITH_WORKERS: {"placement": "partitioned", "workers": str(WORKERS), "slo_ms": "500", **_PATIENCE},
}


def build() -> None:
    """Publish the demo models into `FOLDER`, with one more front that has workers. Raises EngineError."""
    for folder in (_SOURCE, BACKENDS, TASKS, CANDIDATES):
        shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SHIPPED, _SOURCE)
    shutil.copytree(_SOURCE / "encode", _SOURCE / WITH_WORKERS)
    shutil.copytree("checkpoints/cifar-vit/tasks", TASKS)
    shutil.copytree("checkpoints/text-classifiers/candidates", CANDIDATES)
    for name, changes in _CHANGES.items():
        write_front(_SOURCE / name, _SOURCE / name, changes)
    if not (FOLDER / "checkpoints").exists():
        (FOLDER / "checkpoints").symlink_to((BUILD / "checkpoints").resolve())
    for backend in installation.BACKENDS.glob("*/model.py"):
        target = BACKENDS / backend.parent.name / "model.py"
        target.parent.mkdir(parents=True)
        shutil.copyfile(Path(__file__).with_name("hanging_backend.py"), target)
    parser = argparse.ArgumentParser()
    engines.add_arguments(parser)
    options = parser.parse_args(["--repository", str(_SOURCE), "--build", str(FOLDER), "--brief"])
    if engines.run(options):
        raise EngineError("the drill's models could not all be built; the lines above say why")
