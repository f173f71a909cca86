"""Latencies of ViT-Base (random weights) by gamma and batch size: `python -m bench.vit_profile`.

Every round runs every engine at every batch size once, in a new random order. Beside the wall-clock time stands the
processor time of one thread, which other processes of a busy machine stretch less.
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
from typing import Any

import torch
from safetensors.torch import save_file

from build_engines import images
from build_engines.image_engines import Candidate, ImageEngines
from build_engines.settings import Places
from shapeshift.cli.progress import Progress
from shapeshift.engines.hardware import cpu_model
from shapeshift.token_adapt.architecture import Architecture
from shapeshift.token_adapt.engine_settings import ImageEngineSettings
from shapeshift.token_adapt.image_manifest import BATCHES
from shapeshift.token_adapt.schedule import activation_mb, arithmetic, expand, tokens_after
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.token_adapt.timm_weights import as_timm
from shapeshift.token_adapt.unified import UnifiedViT

# By name: width, depth, heads. Patches of 16, images of 224.
SIZES = {"vit_small": (384, 12, 6), "vit_base": (768, 12, 12), "vit_large": (1024, 24, 16)}
Call = Callable[[], object]
Times = dict[tuple[int, int], list[tuple[float, float]]]


def main() -> None:
    """Build the engines, measure, print a table, and write it as JSON where --to says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="vit_base")
    parser.add_argument("--gammas", default=ImageEngineSettings("any").gammas)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--provider", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", type=int, default=0, metavar="BATCH", help="also time the eager model at this batch")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    progress = Progress(options.model)
    planned = plan(options, Path("build/bench/vit_profile").resolve())
    work = planned.front.folder / "engines"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    engines = ImageEngines(planned, work, progress)
    ready = [engines.candidate(gamma) for gamma in planned.front.settings.gamma_list()]
    batches = [int(part) for part in options.batches.split(",")]
    calls = {
        (one.module.gamma, count): partial(one.engine.run, one.module.example(count))
        for one in ready
        for count in batches
    }
    times = measure(calls, options.rounds, progress)
    progress.done()
    made = report(options, planned, ready, times, batches)
    if options.eager:
        made["eager"] = against_eager(ready, options.eager, options.rounds)
    text = json.dumps(made, indent=1)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", encoding="utf-8")


def plan(options: argparse.Namespace, place: Path) -> images.ImagePlan:
    """What is to be built, over a checkpoint with random weights."""
    width, depth, heads = SIZES[options.model]
    folder = place / options.model
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        made = Architecture(image_size=224, patch_size=16, width=width, depth=depth, heads=heads, mlp_width=4 * width)
        model = UnifiedViT(made)
        torch.nn.init.normal_(model.position, std=0.02)
        save_file(as_timm(model), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architecture": f"{options.model}_patch16_224"}))
    own = ImageEngineSettings(str(folder), options.provider, options.precision, options.gammas)
    front = images.ImageFront(options.model, folder, None, own, TokenAdaptSettings(threads=options.threads))
    return images.plan(front, Places(place, place, place))


def measure(calls: Mapping[tuple[int, int], Call], rounds: int, progress: Callable[[str], None]) -> Times:
    """Wall-clock and processor milliseconds of every call, after a warm-up of each."""
    times: Times = {key: [] for key in calls}
    shuffler = random.Random(0)
    order = list(calls)
    for number in range(rounds + 1):
        shuffler.shuffle(order)
        for place, key in enumerate(order):
            progress(f"round {number} of {rounds}: {place} of {len(order)}")
            spent = timed(calls[key])
            if number:
                times[key].append(spent)
    return times


def timed(call: Call) -> tuple[float, float]:
    """Wall-clock and processor milliseconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3


def report(
    options: argparse.Namespace,
    planned: images.ImagePlan,
    ready: Sequence[Candidate],
    times: Times,
    batches: Sequence[int],
) -> dict[str, Any]:
    """The measured points with what they were measured on; `arithmetic` is the paper's count against gamma 0's."""
    own = ready[0].module.model.made
    whole = arithmetic(expand(0, own.patches, own.depth), own.width, own.prefix)
    rows = []
    for one in ready:
        gamma, layers = one.module.gamma, one.module.layers
        middle = {
            count: [round(statistics.median(kind), 2) for kind in zip(*times[gamma, count], strict=True)]
            for count in batches
        }
        rows.append(
            {
                "gamma": gamma,
                "tokens": tokens_after(layers, own.prefix),
                "arithmetic": round(arithmetic(layers, own.width, own.prefix) / whole, 4),
                "latency_ms": {str(count): wall for count, (wall, _) in middle.items()},
                "processor_ms": {str(count): processor for count, (_, processor) in middle.items()},
                "memory_mb": round(activation_mb(layers, own.width, own.heads, own.mlp_width, own.prefix), 2),
            }
        )
    return {
        "hardware": cpu_model(),
        "threads": options.threads,
        "command": f"python -m bench.vit_profile {' '.join(sys.argv[1:])}".strip(),
        "model": f"{options.model}, random weights, {own.patches} patches",
        "provider": f"{planned.provider.name} {planned.provider.version()}",
        "precision": planned.precision,
        "what": f"medians of {options.rounds} rounds, all engines and batch sizes in turn; the machine had other work",
        "image_size": own.image_size,
        "profiles": rows,
    }


def against_eager(ready: Sequence[Candidate], count: int, rounds: int) -> list[dict[str, float]]:
    """Processor time of the eager model and of the engine, the same batch and in turn, by gamma."""
    found = []
    for one in ready:
        example = one.module.example(count)
        pairs = [
            (timed(partial(one.module.features, example))[1], timed(partial(one.engine.run, example))[1])
            for _ in range(rounds + 1)
        ][1:]
        eager, engine = (statistics.median(kind) for kind in zip(*pairs, strict=True))
        found.append(
            {
                "gamma": one.module.gamma,
                "images": count,
                "eager_ms": round(eager, 2),
                "engine_ms": round(engine, 2),
                "ratio": round(eager / engine, 2),
            }
        )
    return found


if __name__ == "__main__":
    main()
