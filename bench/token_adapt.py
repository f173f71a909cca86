"""`classify_image` against other ways to serve it, in one run: `make bench BENCH=token_adapt`.

    ours               the grid's plan at every step
    gamma 0 (PetS)     the plain model, by deadline
    plain model, ...   our plan with gamma 0 alone: what choosing the batches gives without choosing gammas
    gamma ...          one gamma for all: the best one by simulation, and the one that stands for the paper's -15
    the paper's OTAS   Algorithms 2 and 3, batches of up to 64
    INFaaS             three sizes of ViT, one loaded at a time, changed by the rate (emulated part only: there are no
                       trained sizes of the demo); loading takes what reading their weights takes here

Part `emulated` is the real server over models that wait for latencies of ViT-Base, scaled so that gamma 0 serves 50
images a second, with accuracies after what the paper says of its Fig. 4. Part `demo` computes, on requests of 8 images;
its capacity is what gamma 0 serves through the server in closed loops. Both take the paper's Table II; in `demo` the
hardest task stands for CIFAR100, the next for CIFAR10, the easiest for EuroSAT. Utility is what comes in expectation:
of each image in time by the client's clock, its utility times the accuracy of its task at the gamma that served it, as
profiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import token_capacity, token_plots, token_report, token_systems, token_vit_base
from bench.report import empty
from bench.token_loads import stand_ins
from bench.token_part import FULL, QUICK, Extent, Part
from bench.token_systems import OURS, PAPER, PETS, PLANNED, Scheme
from client import hardware
from client.report import head
from shapeshift.errors import ShapeshiftError
from shapeshift.serving.model_args import ModelArgs
from shapeshift.token_adapt import loading
from shapeshift.triton import modelconfig

BUILD = Path("build")
FOLDER = BUILD / "bench"
PARTS = ("emulated", "demo")
IMAGES = 8
"""Of a request of the demo: one image alone would cost client and server more than it costs the small model."""


def emulated_part(extent: Extent, profile: Path) -> tuple[Part, dict[str, Any]]:
    """ViT-Base, emulated."""
    model = token_vit_base.model(profile)
    part = Part(f"emulated ViT-Base ({profile.name})", model, extent, extent.emulated_s, token_vit_base.CAPACITY_PER_S)
    sizes, tasks = token_vit_base.sizes(model)
    switch_ms = token_vit_base.load_ms(FOLDER / "token-weights")
    infaas = token_systems.infaas(sizes, tasks, switch_ms)
    fixed = {load: part.best(load) for load in part.loads}
    named = {scheme.name: scheme for scheme in (OURS, PAPER, PETS, PLANNED, infaas, token_systems.fixed(-15))}
    named |= {scheme.name: scheme for scheme in map(token_systems.fixed, fixed.values())}
    repository = FOLDER / "token-emulated"
    token_systems.publish_emulated(list(named.values()), model, repository)
    with token_systems.serving(list(named.values()), repository, BUILD) as server:

        def schemes(load: str) -> Sequence[Scheme]:
            wanted = [OURS.name, PAPER.name, PETS.name, infaas.name, token_systems.fixed(-15).name]
            wanted += [PLANNED.name] * (load.startswith("1.2") and extent.bursty)
            return [named[name] for name in dict.fromkeys([*wanted, token_systems.fixed(fixed[load]).name])]

        part.measure(server.grpc_url, schemes, extent.at_once)
    return part, {"load_ms": {token_vit_base.SIZES[size][0]: round(ms) for size, ms in switch_ms.items()}}


def demo_part(extent: Extent) -> tuple[Part, dict[str, Any]]:
    """The demo model, computed."""
    generated = BUILD / "repository"
    config = modelconfig.read(generated / token_systems.SERVED / "config.pbtxt")
    stated = modelconfig.parameters(config)
    folder = (generated / token_systems.SERVED).resolve()
    loaded = loading.load(ModelArgs("demo", folder, {}, stated, "CPU", 0), lambda text: None)
    model, alone = loaded.model, loaded.costs.throughput(loaded.rules.batching.size)[0]
    repository = FOLDER / "token-demo"
    token_systems.publish_engines([PETS], generated, repository)
    with token_systems.serving([PETS], repository, BUILD) as server:
        capacity = token_capacity.served(server.grpc_url, PETS.slug, model, IMAGES, extent.demo_s / 2)
    what = f"demo, {stated['precision']}, {IMAGES} images a request"
    part = Part(what, model, extent, extent.demo_s, capacity, IMAGES, max(1.0, alone / capacity))
    del loaded
    # As many tokens less, in their share of all, as the paper's 15 of 197.
    tokens = model.profiles[0].tokens
    alike = min(model.gammas, key=lambda gamma: abs(gamma / tokens + 15 / 197))
    fixed = {load: part.best(load) for load in part.loads}
    named = {scheme.name: scheme for scheme in (OURS, PAPER, PETS, token_systems.fixed(alike))}
    named |= {scheme.name: scheme for scheme in map(token_systems.fixed, fixed.values())}
    token_systems.publish_engines(list(named.values()), generated, repository)
    with token_systems.serving(list(named.values()), repository, BUILD) as server:

        def schemes(load: str) -> Sequence[Scheme]:
            wanted = [OURS.name, PAPER.name, PETS.name, token_systems.fixed(fixed[load]).name]
            wanted += [token_systems.fixed(alike).name] * load.startswith("1.2")
            return [named[name] for name in dict.fromkeys(wanted)]

        part.measure(server.grpc_url, schemes, 1)
    meant = {name: task.name for name, task in stand_ins(model.tasks).items()}
    said = {"images/s at gamma 0": round(capacity, 1), "of the engine alone, as profiled": round(alone, 1)}
    return part, {**said, "tasks": meant, "for -15": alike}


def main() -> int:
    """Run, print, and write tables, data and plots to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.token_adapt", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: one seed, one rate, short cells")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--seeds", help="some of those of the whole run, 0,1")
    parser.add_argument("--profile", type=Path, default=token_vit_base.PROFILE, help="latencies of ViT-Base")
    options = parser.parse_args()
    extent, began = QUICK if options.quick else FULL, time.monotonic()
    if options.seeds:
        extent = replace(extent, seeds=tuple(map(int, options.seeds.split(","))))
    settings: dict[str, Any] = {
        "command": f"python -m bench.token_adapt {' '.join(sys.argv[1:])}".strip(),
        "seeds": ",".join(map(str, extent.seeds)),
        "cells": f"emulated {extent.emulated_s:g} s, demo {extent.demo_s:g} s, after {extent.warm_up_s:g} s of warm-up",
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    plots, text = FOLDER / "token_adapt", [head({"settings": settings, "hardware": hardware.describe()})]
    print(text[0], flush=True)
    empty(plots)
    data: dict[str, Any] = {"settings": settings, "cells": []}
    try:
        for name in options.parts.split(","):
            if name not in PARTS:
                parser.error(f"--parts: got {name}; some of {', '.join(PARTS)}")
            part, told = emulated_part(extent, options.profile) if name == "emulated" else demo_part(extent)
            sys.stderr.write("\r\033[K")
            said = [*token_report.tables(part.results), *token_report.ratios(part.results)]
            said.append("\n" + ", ".join(f"{key}: {value}" for key, value in told.items()))
            print("\n".join(said), flush=True)
            text += said
            data["cells"] += token_report.records(part.results)
            token_plots.all_of(name, part.model, part.results, part.fixed, plots)
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    text.append(f"\ntook {time.monotonic() - began:.0f} s")
    print(text[-1])
    (FOLDER / "token_adapt.txt").write_text("\n".join(text) + "\n")
    (FOLDER / "token_adapt.json").write_text(json.dumps(data, indent=1))
    print(f"written: {FOLDER}/token_adapt.txt, token_adapt.json, token_adapt/*.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
