"""Builds the models and fronts of `bench.cascade` in their own folder, build/bench/cascade/."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
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
_HEAD = """name: "{name}"
backend: "{backend}"
max_batch_size: 64
input [ {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ]{optional} }}{more} ]
"""
_IDS = """,
  { name: "INPUT_IDS" data_type: TYPE_INT64 dims: [ -1 ] optional: true },
  { name: "ATTENTION_MASK" data_type: TYPE_INT64 dims: [ -1 ] optional: true }"""
_FRONT_OUTPUTS = """output [
  { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "CONFIDENCE" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "LEVEL" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "ENGINE_MS" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "CONTROL_MS" data_type: TYPE_FP32 dims: [ 1 ] }
]
"""


def build_paths() -> BuildPaths:
    """The build folder of this benchmark's models."""
    return BuildPaths(Path.cwd(), ROOT.resolve(), (ROOT / "model_repository").resolve())


def model_name(task: str, depth: int) -> str:
    """The Triton model of a fine-tuned checkpoint."""
    return f"{task}_{depth}"


def build_models(task: str, depths: Sequence[int], labels: int) -> list[str]:
    """Compile and verify missing engines; the names of the models."""
    for depth in depths:
        _write_model(task, depth, labels)
    names = [model_name(task, depth) for depth in depths]
    for front in front_models(build_paths(), set(names)):
        assert isinstance(front, TextFrontConfig)
        publish(front, build_paths(), partial(_tell, front.name))
    return names


def publish_front(task: str) -> str:
    """Publish the cascade that serves the task's chosen candidate; its name."""
    name = f"cascade_{task}"
    folder = build_paths().repository / name
    folder.mkdir(parents=True, exist_ok=True)
    text = _HEAD.format(name=name, backend="cascade", optional="", more="") + _FRONT_OUTPUTS
    text += _parameters({"candidates_dir": CANDIDATES.resolve(), "task": task})
    (folder / "config.pbtxt").write_text(text)
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


def _write_model(task: str, depth: int, labels: int) -> None:
    name = model_name(task, depth)
    folder = build_paths().repository / name
    folder.mkdir(parents=True, exist_ok=True)
    more = ""
    if depth <= _SMALL:
        more = """  { name: "IMPORTANCE" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "OFFSETS" data_type: TYPE_INT32 dims: [ -1, 2 ] },
"""
    outputs = f"""output [
  {{ name: "LOGITS" data_type: TYPE_FP32 dims: [ {labels} ] }},
{more}  {{ name: "ENGINE_MS" data_type: TYPE_FP32 dims: [ 1 ] }}
]
"""
    head = _HEAD.format(name=name, backend="polymorph", optional=" optional: true", more=_IDS)
    stated: dict[str, object] = {"checkpoint": checkpoint(task, depth).resolve(), "max_tokens": 128, "max_bins": 6}
    if head_file(task, depth).is_file():
        stated |= {"head": head_file(task, depth).resolve(), "pooling": "mean", "normalize": "false"}
    (folder / "config.pbtxt").write_text(head + outputs + _parameters(stated))


def _parameters(values: dict[str, object]) -> str:
    entries = [
        f"{{ key: {json.dumps(name)} value {{ string_value: {json.dumps(str(value))} }} }}"
        for name, value in values.items()
    ]
    kind = "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
    return f"{kind}parameters [ {', '.join(entries)} ]\n"
