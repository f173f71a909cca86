"""Builds large models of random weights for `bench.cascade` in their own folder, build/bench/cascade/."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shapeshift.build_engines.paths import BuildPaths
from shapeshift.build_engines.repository import front_models
from shapeshift.build_engines.text.config import TextFrontConfig
from shapeshift.build_engines.text.front import publish

ROOT = Path("build/bench/cascade")
BASE = Path("build/checkpoints/all-MiniLM-L6-v2")


def heavy_model(layers: int, labels: Sequence[str]) -> tuple[Path, str]:
    """A model of random weights with so many layers of MiniLM's size, built if it is missing: engines' folder, name."""
    paths, name = BuildPaths(Path.cwd(), ROOT.resolve(), (ROOT / "model_repository").resolve()), f"random_{layers}"
    folder = paths.repository / name
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {"checkpoint": _checkpoint(layers, labels).resolve(), "max_tokens": 128, "max_bins": 6}
    entries = [
        f'{{ key: "{key}" value {{ string_value: {json.dumps(str(value))} }} }}' for key, value in parameters.items()
    ]
    outputs = 'output [ { name: "LOGITS" }, { name: "ENGINE_MS" } ]'
    lines = [f'name: "{name}"', 'backend: "polymorph"', outputs, f"parameters [ {', '.join(entries)} ]"]
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
    (front,) = front_models(paths, {name})
    assert isinstance(front, TextFrontConfig)
    publish(front, paths, partial(_tell, name))
    return paths.engines, name


def _checkpoint(layers: int, labels: Sequence[str]) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = ROOT / "checkpoints" / f"random{len(labels)}-{layers}"
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(layers)
        names: dict[int, Any] = dict(enumerate(labels))
        config = AutoConfig.from_pretrained(BASE, num_hidden_layers=layers, num_labels=len(labels), id2label=names)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        shutil.copyfile(BASE / "tokenizer.json", folder / "tokenizer.json")
    return folder


def _tell(name: str, step: str) -> None:
    print(f"{name}: {step}", file=sys.stderr)
