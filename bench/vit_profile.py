"""Latencies of ViT-Base (random weights) by gamma and batch size: `python -m bench.vit_profile`.

Every round runs every engine at every batch size once, in a new random order. What was measured is kept, so that a run
that `--seconds` ended goes on when it is begun again; `--afresh` forgets it. Of one thread the processor time is
told, which other processes stretch least, of several the time by the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.vit_cells import Cell, Samples, calls, opened
from build_engines import images
from build_engines.settings import Places
from shapeshift.engines.hardware import cpu_model
from shapeshift.progress import Progress
from shapeshift.token_adapt.architecture import Architecture
from shapeshift.token_adapt.engine_settings import ImageEngineSettings
from shapeshift.token_adapt.image_manifest import BATCHES
from shapeshift.token_adapt.schedule import activation_mb, arithmetic, expand, tokens_after
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.token_adapt.timm_weights import as_timm
from shapeshift.token_adapt.unified import UnifiedViT

# By name: width, depth, heads. Patches of 16, images of 224.
SIZES = {"vit_small": (384, 12, 6), "vit_base": (768, 12, 12), "vit_large": (1024, 24, 16)}
PATCH, IMAGE = 16, 224


def main() -> int:
    """Build the engines, measure, print a table, and write it as JSON where --to says; 1 where time ran out."""
    options = arguments()
    torch.set_num_threads(options.threads)
    progress = Progress(options.model)
    planned = plan(options, Path("build/bench/vit_profile").resolve())
    ready = opened(planned, progress)
    batches = [int(part) for part in options.batches.split(",")]
    wanted = [Cell(gamma, count, False) for gamma in ready for count in batches]
    wanted += [Cell(gamma, options.eager, eager) for gamma in ready for eager in (True, False) if options.eager]
    samples = Samples(planned.front.folder / "samples.json", planned.key(), options.afresh)
    done = samples.measure(calls(ready, set(wanted)), options.rounds, options.most_ms, options.seconds, progress)
    progress.done()
    if not done:
        print(f"{samples.left} of {len(set(wanted))} cells are left: run it again to go on", file=sys.stderr)
        return 1
    made = report(options, planned, samples.times, batches)
    text = json.dumps(made, indent=1)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", encoding="utf-8")
    return 0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.vit_profile", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="vit_base")
    parser.add_argument("--gammas", default=ImageEngineSettings("any").gammas)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--provider", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="samples of a cell (%(default)s)")
    parser.add_argument("--most-ms", type=float, default=6000.0, help="but no more once they took that long together")
    parser.add_argument("--eager", type=int, default=0, metavar="BATCH", help="also time the eager model at this batch")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop measuring after that long")
    parser.add_argument("--afresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--to", type=Path)
    return parser.parse_args()


def plan(options: argparse.Namespace, place: Path) -> images.ImagePlan:
    """What is to be built, over a checkpoint with random weights."""
    width, depth, heads = SIZES[options.model]
    folder = place / options.model
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        made = Architecture(
            image_size=IMAGE, patch_size=PATCH, width=width, depth=depth, heads=heads, mlp_width=4 * width
        )
        model = UnifiedViT(made)
        torch.nn.init.normal_(model.position, std=0.02)
        save_file(as_timm(model), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architecture": f"{options.model}_patch{PATCH}_{IMAGE}"}))
    own = ImageEngineSettings(str(folder), options.provider, options.precision, options.gammas)
    front = images.ImageFront(options.model, folder, None, own, TokenAdaptSettings(threads=options.threads))
    return images.plan(front, Places(place, place, place))


def report(
    options: argparse.Namespace,
    planned: images.ImagePlan,
    times: Mapping[Cell, Sequence[tuple[float, float]]],
    batches: Sequence[int],
) -> dict[str, Any]:
    """The measured points with what they were measured on; `arithmetic` is the paper's count against gamma 0's."""
    width, depth, heads = SIZES[options.model]
    patches = (IMAGE // PATCH) ** 2
    whole = arithmetic(expand(0, patches, depth), width)
    one_thread = options.threads == 1
    middle = {cell: round(statistics.median(pair[one_thread] for pair in pairs), 2) for cell, pairs in times.items()}
    gammas = planned.front.settings.gamma_list()
    rows = []
    for gamma in gammas:
        layers = expand(gamma, patches, depth)
        rows.append(
            {
                "gamma": gamma,
                "tokens": tokens_after(layers),
                "arithmetic": round(arithmetic(layers, width) / whole, 4),
                "latency_ms": {str(count): middle[Cell(gamma, count, False)] for count in batches},
                "memory_mb": round(activation_mb(layers, width, heads, 4 * width), 2),
            }
        )
    made = {
        "hardware": cpu_model(),
        "threads": options.threads,
        "command": "python -m bench.vit_profile "
        f"--model {options.model} --threads {options.threads} --rounds {options.rounds} --eager {options.eager}",
        "model": f"{options.model}, random weights, {patches} patches",
        "provider": f"{planned.provider.name} {planned.provider.version()}",
        "precision": planned.precision,
        "what": f"medians of up to {options.rounds} rounds, all engines and batch sizes in turn; "
        + ("processor time of the thread" if one_thread else "time by the clock"),
        "image_size": IMAGE,
        "profiles": rows,
    }
    if options.eager:
        made["eager"] = [against_eager(gamma, options.eager, middle) for gamma in gammas]
    return made


def against_eager(gamma: int, count: int, middle: Mapping[Cell, float]) -> dict[str, float]:
    """The eager model beside the engine, the same batch, threads and precision."""
    eager, engine = (middle[Cell(gamma, count, kind)] for kind in (True, False))
    ratio = round(eager / engine, 2)
    return {"gamma": gamma, "images": count, "eager_ms": eager, "engine_ms": engine, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(main())
