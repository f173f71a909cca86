"""Builds the models and fronts of `bench.cascade` in their own folder, build/bench/cascade/."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.cascade.train import BASE, checkpoint, head_file
from shapeshift.build_engines import cascade
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.front import publish
from shapeshift.triton import model_config

ROOT = Path("build/bench/cascade")
CANDIDATES = ROOT / "candidates"
_SMALL = 3
_PRUNING = ("IMPORTANCE", "OFFSETS")


def build_paths() -> BuildPaths:
    """The build folder of this benchmark's models."""
    return BuildPaths(Path.cwd(), ROOT.resolve(), (ROOT / "model_repository").resolve())


def model_name(task: str, depth: int) -> str:
    """The Triton model of a fine-tuned checkpoint."""
    return f"{task}_{depth}"


def build_models(task: str, depths: Sequence[int]) -> list[str]:
    """Compile and verify missing engines; the names of the models."""
    for depth in depths:
        _write_model(task, depth)
    names = [model_name(task, depth) for depth in depths]
    for front in front_models(build_paths(), set(names)):
        assert isinstance(front, TextFrontConfig)
        publish(front, build_paths(), partial(_tell, front.name))
    return names


def publish_front(task: str) -> str:
    """Publish the cascade that serves the task's chosen candidate; its name."""
    name = f"cascade_{task}"
    folder = _write(name, "cascade", (), {"candidates_dir": CANDIDATES.resolve(), "task": task})
    config = model_config.read(folder / "config.pbtxt")
    cascade.publish(cascade.read(folder, config, model_config.parameters(config)), build_paths())
    return name


def heavy_checkpoint(layers: int, labels: Sequence[str]) -> str:
    """Make a checkpoint of random weights with so many layers of MiniLM's size; the task in its model's name."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    task = f"random{len(labels)}"
    folder = checkpoint(task, layers)
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(layers)
        names: dict[int, Any] = dict(enumerate(labels))
        config = AutoConfig.from_pretrained(BASE, num_hidden_layers=layers, num_labels=len(labels), id2label=names)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        shutil.copyfile(BASE / "tokenizer.json", folder / "tokenizer.json")
    return task


def _tell(name: str, step: str) -> None:
    print(f"{name}: {step}", file=sys.stderr)


def _write_model(task: str, depth: int) -> None:
    parameters: dict[str, object] = {"checkpoint": checkpoint(task, depth).resolve(), "max_tokens": 128, "max_bins": 6}
    if head_file(task, depth).is_file():
        parameters |= {"head": head_file(task, depth).resolve(), "pooling": "mean", "normalize": "false"}
    outputs = ("LOGITS", *(_PRUNING if depth <= _SMALL else ()), "ENGINE_MS")
    _write(model_name(task, depth), "polymorph", outputs, parameters)


def _write(name: str, backend: str, outputs: Sequence[str], parameters: Mapping[str, object]) -> Path:
    """Write the configuration of a front, which the build completes; its folder."""
    folder = build_paths().repository / name
    folder.mkdir(parents=True, exist_ok=True)
    entries = [
        f"{{ key: {json.dumps(key)} value {{ string_value: {json.dumps(str(value))} }} }}"
        for key, value in parameters.items()
    ]
    listed = ", ".join(f'{{ name: "{output}" }}' for output in outputs)
    lines = [f'name: "{name}"', f'backend: "{backend}"', *([f"output [ {listed} ]"] if outputs else [])]
    (folder / "config.pbtxt").write_text("\n".join([*lines, f"parameters [ {', '.join(entries)} ]"]) + "\n")
    return folder
