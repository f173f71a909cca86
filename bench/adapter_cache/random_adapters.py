"""Adapters of random weights: PEFT folders, and a registry of them for the model of the decode benchmarks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.registry import store

TARGETS = ("q_proj", "v_proj")
RANK, MOST_RANKS = 16, 128
_FORM = 2


def bytes_per_rank(model: Path) -> int:
    """Bytes of f32 weights of an adapter, for each of its ranks."""
    config = json.loads((model / "config.json").read_text())
    return int(config["num_hidden_layers"]) * len(TARGETS) * 2 * int(config["hidden_size"]) * 4


def ensure(folder: Path, model: Path, adapters: Mapping[str, AdapterInfo], targets: Sequence[str] = TARGETS) -> Path:
    """A registry in `folder` with `adapters`, which are made if missing (half a minute)."""
    stamp, state = folder / "made.json", {"form": _FORM, "targets": targets, "adapters": sorted(adapters)}
    content = json.loads(json.dumps(state))
    if not stamp.exists() or json.loads(stamp.read_text()) != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for seed, (name, adapter) in enumerate(sorted(adapters.items())):
            source = folder / ".made"
            write(source, model, adapter.rank, targets, seed)
            store.add(folder, name, source, pinned=False)
            shutil.rmtree(source)
        stamp.write_text(json.dumps(content))
    return folder


def path(folder: Path, model: Path, number: int) -> Path:
    """The PEFT folder of adapter `number`, of RANK ranks; made if missing."""
    target = folder / str(number)
    if not (target / "adapter_config.json").is_file():
        write(target, model, RANK, TARGETS, number)
    return target


def loaded(model: Any, folder: Path, adapters: Sequence[Path]) -> tuple[Any, list[Any]]:
    """The weights of PEFT folders for the `DecodeModel` of `folder`, one after another in memory, and their places."""
    import torch

    from shapeshift.adapter_cache.lora.batch import shifted
    from shapeshift.adapter_cache.lora.segmented import TorchLora
    from shapeshift.adapter_cache.memory.adapter_table import make_adapter
    from shapeshift.adapter_cache.memory.loader import load_weights
    from shapeshift.adapter_cache.registry import peft

    base, width = (
        peft.BaseModel.of_decoder(model.architecture, {folder.name}, MOST_RANKS, folder),
        model.memory.element_size(),
    )
    records = [make_adapter(one.name, "0", peft.read(one, base), width) for one in adapters]
    memory = torch.zeros(sum(one.elements for one in records), dtype=model.memory.dtype)
    places, start = [], 0
    for one in records:
        one.verified = True
        load_weights(memory[start : start + one.elements], one, TorchLora().store)
        places.append(shifted(one.relative, start))
        start += one.elements
    return memory, places


def write(folder: Path, model: Path, rank: int, targets: Sequence[str], seed: int) -> None:
    """A PEFT folder with random weights of `targets`, modules of the attention of `model`."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    width = int(config["hidden_size"])
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(int(config["num_hidden_layers"])):
        for target in targets:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * 0.02
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * 0.02
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config, indent=1))
