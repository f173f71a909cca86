"""`python -m bench.fused_decode.kv_precision`: decode steps over a cache in int8, against one in bf16.

Llama of 110 million random parameters with as many key and value heads as query heads; steps of 1, 8 and 32 requests
with 512 to 4,096 tokens each in the cache. Both models take turns, so that other load on the machine meets both.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.foreign_load import ForeignLoad
from bench.common.output import FOLDER, Output, progress
from bench.fused_decode.ranks import KERNELS, System
from bench.peers import random_llama
from shapeshift.engines.hardware import cores
from shapeshift.fused_decode.model import kernel_build
from shapeshift.fused_decode.model.precision import KV_PRECISIONS

ROWS = (1, 8, 32)
CONTEXTS = (512, 1024, 2048, 4096)
LONGEST = max(CONTEXTS) + 16


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8, help="turns of each model in each cell")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--precision", default="bf16", help="of weights and activations")
    options = parser.parse_args(arguments)
    # Before torch is imported.
    kernel_build.limit_spinning()
    settings = {"turns": options.turns, "steps": options.steps, "precision": options.precision, "threads": cores()}
    output = Output("fused_decode.kv_precision", settings, "fused_decode-kv_precision")
    folder = _with_long_texts(random_llama.ensure(FOLDER / "llama-110m"))
    systems = [_system(folder, options.precision, kept) for kept in KV_PRECISIONS]
    sizes = [system.model.block_elements for system in systems]
    output.say(f"  a block in int8 has {sizes[1] / sizes[0]:.2f} of the bytes")
    output.say(f"  {'requests':>8}{'tokens each':>13}{options.precision:>10}{'int8':>10}   ms a step; speed of int8")
    cells = []
    for rows in ROWS:
        for context in CONTEXTS:
            progress(f"{rows} requests, {context} tokens")
            with ForeignLoad() as foreign:
                plain, own = _cell(systems, rows, context, options.turns, options.steps)
            output.say(
                f"  {rows:>8}{context:>13}{plain:>10.1f}{own:>10.1f}   {plain / own:.2f}"
                f"   (other processes: {foreign.cores:.2f} cores)"
            )
            cell = {"rows": rows, "context": context, "plain_ms": plain, "int8_ms": own, "foreign": foreign.cores}
            cells.append(cell)
    output.data |= {"cells": cells, "bytes": sizes[1] / sizes[0]}
    output.save()
    return 0


def _with_long_texts(model: Path) -> Path:
    """The same model in a folder of its own, for texts of LONGEST tokens."""
    folder = model.with_name(f"{model.name}-long")
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    weights = folder / "model.safetensors"
    if not weights.exists():
        weights.symlink_to((model / weights.name).resolve())
    return folder


def _system(folder: Path, precision: str, kv_precision: str) -> System:
    from shapeshift.fused_decode.model.cpu_runtime import DecodeModel

    model = DecodeModel.load(
        folder,
        precision=precision,
        kv_precision=kv_precision,
        slots=max(ROWS),
        max_length=LONGEST,
        threads=cores(),
        cache_dir=KERNELS,
    )
    # Memory that was never written to is one page, which the processor holds.
    cache = model._cache
    for vectors, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        if scales is None:
            vectors.normal_()
        else:
            vectors.random_(-127, 128)
            scales.fill_(0.01)
    return System(kv_precision, model, cores())


def _cell(systems: list[System], rows: int, context: int, turns: int, steps: int) -> list[float]:
    """Median ms of a step of each system."""
    import torch

    from shapeshift.fused_decode.interfaces import StepBatch

    step: Any = StepBatch(
        tokens=torch.arange(rows) + 100,
        slots=torch.arange(rows, dtype=torch.int32),
        starts=torch.full((rows,), context - 1, dtype=torch.int32),
        lengths=torch.ones(rows, dtype=torch.int32),
        wanted=torch.arange(rows),
    )
    times: list[list[float]] = [[] for _ in systems]
    for _ in range(turns):
        for own, system in zip(times, systems, strict=True):
            own += system.milliseconds(step, steps)
    return [median(own) for own in times]


if __name__ == "__main__":
    sys.exit(main())
