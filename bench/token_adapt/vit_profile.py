"""Latencies by gamma and batch size of a ViT with random weights, or of a checkpoint: `python -m
bench.token_adapt.vit_profile`.

Every round runs every engine at every batch size once, in a new random order. For one thread the result is processor
time, which other processes disturb least; for several threads it is wall-clock time.
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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from bench.common.output import BUILD
from shapeshift.build_engines.image.engines import ImageEngineBuilder, folder_of
from shapeshift.build_engines.image.plan import ImageFrontConfig, ImagePlan, plan
from shapeshift.build_engines.paths import BuildPaths
from shapeshift.engines.hardware import cpu_model
from shapeshift.progress import Progress
from shapeshift.token_adapt.checkpoints.weights import as_timm, read_model
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.gamma_module import GammaModule
from shapeshift.token_adapt.model.manifest import BATCHES
from shapeshift.token_adapt.model.schedule import activation_mb, count_multiplications, expand, output_tokens
from shapeshift.token_adapt.model.vision_transformer import UnifiedViT
from shapeshift.token_adapt.settings import ImageEngineSettings, TokenAdaptSettings

# By name: width, depth, heads. Patches of 16, images of 224.
SIZES = {"vit_small": (384, 12, 6), "vit_base": (768, 12, 12), "vit_large": (1024, 24, 16)}
PATCH, IMAGE = 16, 224


class Cell(NamedTuple):
    """One engine, or the eager model, at one batch size."""

    gamma: int
    images: int
    eager: bool


def main() -> int:
    """Build the engines, measure, print the result as JSON and write it to --to."""
    options = arguments()
    torch.set_num_threads(options.threads)
    progress = Progress(options.checkpoint or options.model)
    planned = plan_model(options, Path("build/bench/vit_profile").resolve())
    batches = [int(part) for part in options.batches.split(",")]
    times = measure(calls(planned, batches, options.eager, progress), options.rounds, options.most_ms, progress)
    progress.done()
    text = json.dumps(report(options, planned, times, batches), indent=1)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", encoding="utf-8")
    return 0


def arguments() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.token_adapt.vit_profile", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", choices=SIZES, default="vit_base", help="with random weights (%(default)s)")
    parser.add_argument("--checkpoint", default="", metavar="FOLDER_OR_NAME", help="in its place")
    parser.add_argument("--gammas", default=ImageEngineSettings("any").gammas)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--provider", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="samples of a cell (%(default)s)")
    parser.add_argument(
        "--most-ms", type=float, default=6000.0, help="no more samples of a cell once they take this long in all"
    )
    parser.add_argument("--eager", type=int, default=0, metavar="BATCH", help="also time the eager model at this batch")
    parser.add_argument("--to", type=Path)
    return parser.parse_args()


def calls(
    planned: ImagePlan, batches: Sequence[int], eager: int, progress: Callable[[str], None]
) -> dict[Cell, Callable[[], object]]:
    """Build and open the engines: the call that each cell measures."""
    work = planned.front.folder / "engines"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    engines = ImageEngineBuilder(planned, work, progress)
    model, _, _ = read_model(planned.checkpoint.folder)
    cells: dict[Cell, Callable[[], object]] = {}
    for gamma in planned.gammas:
        engines.build_gamma(gamma)
        runtime = planned.provider.open(work / folder_of(gamma), planned.precision, planned.threads)
        module, engine = GammaModule(model, gamma).eval(), runtime.engine(None, None)
        for images in {*batches, *([eager] if eager else [])}:
            example = module.example(images)
            cells[Cell(gamma, images, False)] = lambda engine=engine, example=example: engine.run(example)  # type: ignore[misc]
        if eager:
            example = module.example(eager)
            cells[Cell(gamma, eager, True)] = lambda module=module, example=example: module.features(example)  # type: ignore[misc]
    return cells


def measure(
    cells: Mapping[Cell, Callable[[], object]], rounds: int, most_ms: float, progress: Callable[[str], None]
) -> dict[Cell, list[tuple[float, float]]]:
    """Wall-clock and processor milliseconds of each cell's calls, which an unmeasured round precedes."""
    times: dict[Cell, list[tuple[float, float]]] = {cell: [] for cell in cells}
    for turn in range(rounds + 1):
        order = [cell for cell, pairs in times.items() if sum(wall for wall, _ in pairs) < most_ms]
        for number, cell in enumerate(random.Random(turn).sample(order, len(order))):
            progress(f"round {turn}, gamma {cell.gamma}, batch {cell.images}: {number} of {len(order)}")
            wall, processor = time.perf_counter(), time.process_time()
            cells[cell]()
            if turn:
                took = (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3
                times[cell].append(took)
    return times


def plan_model(options: argparse.Namespace, work: Path) -> ImagePlan:
    """The plan of the engines, over the checkpoint, or over one with random weights."""
    width, depth, heads = SIZES[options.model]
    folder = work / (Path(options.checkpoint).name or options.model)
    folder.mkdir(parents=True, exist_ok=True)
    if not options.checkpoint and not (folder / "config.json").is_file():
        torch.manual_seed(0)
        architecture = Architecture(
            image_size=IMAGE, patch_size=PATCH, width=width, depth=depth, heads=heads, mlp_width=4 * width
        )
        model = UnifiedViT(architecture)
        torch.nn.init.normal_(model.position, std=0.02)
        save_file(as_timm(model), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architecture": f"{options.model}_patch{PATCH}_{IMAGE}"}))
    (folder / "config.pbtxt").write_text(f'name: "{options.model}"\nbackend: "token_adapt"\n')
    checkpoint = options.checkpoint or str(folder)
    settings = ImageEngineSettings(checkpoint, options.provider, options.precision, options.gammas)
    front = ImageFrontConfig(options.model, folder, None, settings, TokenAdaptSettings(threads=options.threads))
    return plan(front, BuildPaths(Path.cwd(), BUILD, work), has_tasks=True)


def report(
    options: argparse.Namespace,
    planned: ImagePlan,
    times: Mapping[Cell, Sequence[tuple[float, float]]],
    batches: Sequence[int],
) -> dict[str, Any]:
    """The measured points and their conditions; `arithmetic` is the paper's count of operations over gamma 0's."""
    architecture = planned.described.architecture
    whole = count_multiplications(expand(0, architecture.patches, architecture.depth), architecture.width)
    one_thread = options.threads == 1
    medians = {cell: round(statistics.median(pair[one_thread] for pair in pairs), 2) for cell, pairs in times.items()}
    gammas = planned.gammas
    chosen = f"--checkpoint {options.checkpoint}" if options.checkpoint else f"--model {options.model}"
    rows = []
    for gamma in gammas:
        layers = expand(gamma, architecture.patches, architecture.depth)
        rows.append(
            {
                "gamma": gamma,
                "tokens": output_tokens(layers),
                "arithmetic": round(count_multiplications(layers, architecture.width) / whole, 4),
                "latency_ms": {str(count): medians[Cell(gamma, count, False)] for count in batches},
                "memory_mb": round(
                    activation_mb(layers, architecture.width, architecture.heads, architecture.hidden_width), 2
                ),
            }
        )
    result = {
        "hardware": cpu_model(),
        "threads": options.threads,
        "command": f"python -m bench.token_adapt.vit_profile {chosen} --gammas={options.gammas} "
        f"--batches {options.batches} --threads {options.threads} --rounds {options.rounds} --eager {options.eager}",
        "model": f"{options.checkpoint or f'{options.model}, random weights'}, {architecture.patches} patches",
        "provider": f"{planned.provider.name} {planned.provider.version()}",
        "precision": planned.precision,
        "what": f"medians of up to {options.rounds} rounds, all engines and batch sizes in turn; "
        + ("processor time of the thread" if one_thread else "time by the clock"),
        "image_size": architecture.image_size,
        "profiles": rows,
    }
    if options.eager:
        result["eager"] = [against_eager(gamma, options.eager, medians) for gamma in gammas]
    return result


def against_eager(gamma: int, count: int, medians: Mapping[Cell, float]) -> dict[str, float]:
    """The eager model and the engine at the same batch size, threads and precision."""
    eager, engine = (medians[Cell(gamma, count, kind)] for kind in (True, False))
    ratio = round(eager / engine, 2)
    return {"gamma": gamma, "images": count, "eager_ms": eager, "engine_ms": engine, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main())
