"""The adapters of `bench.adapter_cache.step`: their files, and their records in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.adapter_cache import random_adapters

RANKS = (8, 16, 32, 64, 128, 8, 16, 32)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
CONTEXT = 64


def make(folder: Path, base: Path, number: int) -> Path:
    """The PEFT folder of an adapter, with random weights; made if missing."""
    target = folder / f"r{RANKS[number]}-{number}"
    if not (target / "adapter_config.json").is_file():
        random_adapters.write(target, base, RANKS[number], TARGETS, seed=number)
    return target


def records_of(folder: Path, adapters: list[Path], model: Any) -> list[Any]:
    """The cache's records of the adapters."""
    from shapeshift.adapter_cache.memory.adapter_table import make_adapter
    from shapeshift.adapter_cache.registry import peft

    base = peft.BaseModel(model.architecture, {folder.name}, max(RANKS), folder)
    width = model.memory.element_size()
    made = [make_adapter(one.name, "0", peft.read(one, base), model.architecture, width) for one in adapters]
    for one in made:
        one.verified = True
    return made
