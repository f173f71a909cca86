"""A registry of adapters of random weights, for the model that the decode benchmarks run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from shapeshift.adapter_cache import registry
from shapeshift.adapter_cache.interfaces import AdapterInfo

TARGETS = ("q_proj", "v_proj")
_FORM = 2


def bytes_per_rank(model: Path) -> int:
    """Bytes of f32 weights that each rank of an adapter takes."""
    config = json.loads((model / "config.json").read_text())
    return int(config["num_hidden_layers"]) * len(TARGETS) * 2 * int(config["hidden_size"]) * 4


def ensure(folder: Path, model: Path, known: Mapping[str, AdapterInfo]) -> Path:
    """A registry in `folder` with the adapters of `known`; made (half a minute) where they are missing."""
    stamp, state = folder / "made.json", {"form": _FORM, "targets": TARGETS, "adapters": sorted(known)}
    wanted = json.loads(json.dumps(state))
    if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for seed, (name, one) in enumerate(sorted(known.items())):
            source = folder / ".made"
            _write(source, model, one.rank, seed)
            registry.add(folder, name, source, pinned=False)
            shutil.rmtree(source)
        stamp.write_text(json.dumps(wanted))
    return folder


def _write(folder: Path, model: Path, rank: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    width = int(config["hidden_size"])
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(int(config["num_hidden_layers"])):
        for target in TARGETS:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, width, generator=drawn) * 0.02
            tensors[f"{stem}.lora_B.weight"] = torch.randn(width, rank, generator=drawn) * 0.02
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated, indent=1))
