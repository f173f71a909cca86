"""Latencies by gamma and batch size of ViT-Base with random weights, or of a checkpoint: `python -m
bench.token_adapt.vit_profile`.

Every round runs every engine at every batch size once, in a new random order. The result is the processor time of one
thread, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from bench.common.output import BUILD, FOLDER
from shapeshift.build_engines.image.engines import ImageEngineBuilder
from shapeshift.build_engines.image.plan import ImageFrontConfig, ImagePlan, plan
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines.hardware import cpu_model
from shapeshift.progress import Progress
from shapeshift.token_adapt.checkpoints.weights import as_timm
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.manifest import BATCHES
from shapeshift.token_adapt.model.schedule import activation_mb, count_multiplications, expand, output_tokens
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT
from shapeshift.token_adapt.settings import ImageEngineSettings, TokenAdaptSettings

BASE = "vit_base_patch16_224"
MOST_MS = 6000.0
"""No more samples of a cell once they take this long in all."""


class Cell(NamedTuple):
    """One engine, or the eager model, at one batch size."""

    gamma: int
    images: int
    eager: bool = False


def main() -> int:
    """Build the engines, measure, print the result as JSON and write it to --to."""
    parser = argparse.ArgumentParser(prog="python -m bench.token_adapt.vit_profile", description=__doc__.split(":")[0])
    parser.add_argument("--checkpoint", default="", metavar="FOLDER_OR_NAME", help="in place of ViT-Base")
    parser.add_argument("--gammas", default=ImageEngineSettings("any").gammas)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--rounds", type=int, default=5, help="samples of a cell (%(default)s)")
    parser.add_argument("--eager", type=int, default=0, metavar="BATCH", help="also time the eager model at this batch")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    progress = Progress(options.checkpoint or BASE)
    planned = plan_model(options.checkpoint, options.gammas, (FOLDER / "vit_profile").resolve())
    batches = [int(part) for part in options.batches.split(",")]
    calls = open_engines(planned, batches, options.eager, progress)
    profile = report(options, planned, measure(calls, options.rounds, progress), batches)
    progress.done()
    text = json.dumps(profile, indent=1)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", encoding="utf-8")
    return 0


def plan_model(checkpoint: str, gammas: str, work: Path) -> ImagePlan:
    """The plan of the engines, over the checkpoint, or over ViT-Base with random weights."""
    name = Path(checkpoint).name or "vit_base"
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    if not checkpoint and not (folder / "config.json").is_file():
        torch.manual_seed(0)
        model = UnifiedViT(Architecture(image_size=224, patch_size=16, width=768, depth=12, heads=12, mlp_width=3072))
        torch.nn.init.normal_(model.position, std=0.02)
        save_file(as_timm(model), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architecture": BASE}))
    (folder / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "token_adapt"\n')
    settings = ImageEngineSettings(checkpoint or str(folder), gammas=gammas)
    front = ImageFrontConfig(name, folder, None, settings, TokenAdaptSettings(threads=1))
    return plan(front, BuildPaths(Path.cwd(), BUILD, work), has_tasks=True)


def open_engines(
    planned: ImagePlan, batches: Sequence[int], eager: int, progress: Callable[[str], None]
) -> dict[Cell, Callable[[], object]]:
    """Build and open the engines: the call that each cell measures."""
    work = planned.front.folder / "engines"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    engines = ImageEngineBuilder(planned, work, progress)
    cells: dict[Cell, Callable[[], object]] = {}
    for gamma in planned.gammas:
        built = engines.build_gamma(gamma)
        for images in {*batches, *([eager] if eager else [])}:
            example = built.module.example(images)
            cells[Cell(gamma, images)] = partial(built.engine.run, example)
            if images == eager:
                cells[Cell(gamma, eager, True)] = partial(built.module.features, example)
    return cells


def measure(
    cells: Mapping[Cell, Callable[[], object]], rounds: int, progress: Callable[[str], None]
) -> dict[Cell, float]:
    """Median processor milliseconds of each cell's calls, which an unmeasured round precedes."""
    times: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for turn in range(rounds + 1):
        order = [cell for cell, of_cell in times.items() if sum(of_cell) < MOST_MS]
        for number, cell in enumerate(random.Random(turn).sample(order, len(order))):
            progress(f"round {turn}, gamma {cell.gamma}, batch {cell.images}: {number} of {len(order)}")
            before = time.process_time()
            cells[cell]()
            if turn:
                times[cell].append((time.process_time() - before) * 1e3)
    return {cell: round(statistics.median(of_cell), 2) for cell, of_cell in times.items()}


def report(
    options: argparse.Namespace, planned: ImagePlan, times_ms: Mapping[Cell, float], batches: Sequence[int]
) -> dict[str, Any]:
    """The measured points and their conditions; `arithmetic` is the paper's count of operations over gamma 0's."""
    architecture = planned.described.architecture
    whole = count_multiplications(expand(0, architecture.patches, architecture.depth), architecture.width)
    rows = []
    for gamma in planned.gammas:
        layers = expand(gamma, architecture.patches, architecture.depth)
        row: dict[str, Any] = {
            "gamma": gamma,
            "tokens": output_tokens(layers),
            "arithmetic": round(count_multiplications(layers, architecture.width) / whole, 4),
            "latency_ms": {str(count): times_ms[Cell(gamma, count)] for count in batches},
            "memory_mb": round(
                activation_mb(layers, architecture.width, architecture.heads, architecture.hidden_width), 2
            ),
        }
        if options.eager:
            row["eager_ms"] = times_ms[Cell(gamma, options.eager, True)]
            row["eager / engine"] = round(row["eager_ms"] / times_ms[Cell(gamma, options.eager)], 2)
        rows.append(row)
    return {
        "hardware": cpu_model(),
        "threads": 1,
        "command": " ".join(["python -m bench.token_adapt.vit_profile", *sys.argv[1:]]),
        "model": f"{options.checkpoint or 'ViT-Base, random weights'}, {architecture.patches} patches",
        "provider": f"{planned.provider.name} {planned.provider.version()}",
        "precision": planned.precision,
        "what": f"medians of up to {options.rounds} rounds, all engines and batch sizes in turn; processor time",
        "image_size": architecture.image_size,
        "profiles": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
