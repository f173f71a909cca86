"""Writes the folder of a task, and measures its profile (Register_Task)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from shapeshift import files
from shapeshift.engines.hardware import cpu_model
from shapeshift.engines.interfaces import Array
from shapeshift.token_adapt.model.vision_model import VisionModel
from shapeshift.token_adapt.request import Task
from shapeshift.token_adapt.tasks import folder as task_folder
from shapeshift.token_adapt.tasks.examples import Examples
from shapeshift.token_adapt.tasks.folder import TaskParts
from shapeshift.token_adapt.tasks.training import Progress, TrainedTask

_CHUNK = 64


def write_task(folder: Path, description: dict[str, Any], trained: TrainedTask) -> None:
    """Write task.json (`description`), and prompts and heads in f16, into `folder`; its other files stay.

    Each file takes its place whole, task.json last: while it is missing, what is there is of two trainings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = {str(gamma): _half(values.numpy()) for gamma, values in trained.prompts.items()}
    heads: dict[str, Array] = {}
    for gamma, (weight, bias) in trained.heads.items():
        heads |= {f"{gamma}.weight": _half(weight.numpy()), f"{gamma}.bias": _half(bias.numpy())}
    with files.draft_of(folder / "training") as work:
        work.mkdir()
        tensors = {task_folder.PROMPTS_FILE: prompts, task_folder.HEAD_FILE: heads}
        for name, content in tensors.items():
            save_file(content, work / name)
            files.let_read(work / name)
            files.flush(work / name)
        (folder / task_folder.TASK_FILE).unlink(missing_ok=True)
        for name in tensors:
            (work / name).replace(folder / name)
    write_object(folder / task_folder.TASK_FILE, description)


def write_object(file: Path, value: dict[str, Any]) -> None:
    """Replace the content of a file by a JSON object."""
    files.replace_text(file, json.dumps(value, indent=1) + "\n")


def profile(model: VisionModel, parts: TaskParts, held_out: Examples, progress: Progress) -> dict[str, Any]:
    """The content of profile.json: accuracy on `held_out` by gamma, and how it was measured."""
    task = model.task(parts, {})
    return {
        "accuracy": {str(gamma): share for gamma, share in accuracies(model, task, held_out, progress).items()},
        "images": len(held_out),
        "hardware": cpu_model(),
        "command": "shapeshift tasks register",
    }


def accuracies(model: VisionModel, task: Task, examples: Examples, progress: Progress) -> dict[int, float]:
    """Top-1 accuracy of `task` by gamma, computed by the engines."""
    accuracy = {}
    chunks = np.array_split(np.arange(len(examples)), -(-len(examples) // _CHUNK))
    for gamma in model.gammas:
        progress(f"accuracy at gamma {gamma} over {len(examples)} images")
        num_correct = 0
        for chunk in chunks:
            results = model.run(gamma, examples.pixels(chunk), [task] * len(chunk))
            predicted = [int(probabilities.argmax()) for probabilities in results]
            num_correct += int((np.array(predicted) == examples.classes[chunk]).sum())
        accuracy[gamma] = num_correct / len(examples)
    return accuracy


def _half(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float16)
