"""`classify_image` against other ways to serve it, in one run: `make bench BENCH=token_adapt`.

    ours               the plan over all gammas at every step
    gamma 0 (PetS)     the plain model, by deadline
    plain model, ...   our plan with gamma 0 alone: the gain of choosing batches without choosing gammas
    gamma ...          one gamma for all: the best one by simulation, and the one that corresponds to the paper's -15
    the paper's OTAS   Algorithms 2 and 3, batches of up to 64
    INFaaS             three sizes of ViT, one loaded at a time, changed by the rate (emulated part only: the demo has
                       no trained sizes); loading takes as long as reading their weights takes here

Part `emulated` is the real server over models that wait for latencies of ViT-Base, scaled so that gamma 0 serves 50
images a second, with accuracies after the paper's description of its Fig. 4. Part `demo` computes; its capacity is
what gamma 0 serves through the server in closed loops. Both use the paper's Table II; in `demo` the hardest task
represents CIFAR100, the next CIFAR10, the easiest EuroSAT. Utility is expected utility: an image that is in time by the
client's clock counts its utility times the profiled accuracy of its task at the gamma that served it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common.output import BUILD, FOLDER, Output, name_of_parts, program
from bench.common.server import running_server
from bench.token_adapt import report, systems, vit_base
from bench.token_adapt.cells import measure_capacity
from bench.token_adapt.loads import representatives
from bench.token_adapt.part import FULL, QUICK, Part, Scale
from bench.token_adapt.systems import OURS, PAPER, PETS, PLANNED, Scheme
from shapeshift import settings
from shapeshift.serving.model_args import ModelArgs
from shapeshift.token_adapt.front import costs_of, open_vision_model
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.triton import model_config

PARTS = ("emulated", "demo")


def emulated_part(scale: Scale, profile: Path) -> tuple[Part, dict[str, Any]]:
    """ViT-Base, emulated; with further figures."""
    model = vit_base.model(profile)
    part = Part(f"emulated ViT-Base ({profile.name})", model, scale, scale.emulated_s, vit_base.CAPACITY_PER_S)
    sizes, tasks = vit_base.sizes(model)
    switch_ms = vit_base.load_ms(FOLDER / "token-weights")
    infaas = systems.infaas(sizes, tasks, switch_ms)
    best = {load: systems.fixed(part.best(load)) for load in part.loads}
    schemes = _by_name([OURS, PAPER, PETS, PLANNED, infaas, systems.fixed(-15), *best.values()])
    repository = FOLDER / "token-emulated"
    systems.publish_emulated(list(schemes.values()), model, repository)
    with running_server([scheme.slug for scheme in schemes.values()], (repository,)) as server:

        def of(load: str) -> Sequence[Scheme]:
            planned = [PLANNED] * (load.startswith("1.2") and scale.bursty)
            return list(_by_name([OURS, PAPER, PETS, infaas, systems.fixed(-15), *planned, best[load]]).values())

        part.measure(server.grpc_url, of, scale.at_once)
    return part, {"load_ms": {vit_base.SIZES[size][0]: round(ms) for size, ms in switch_ms.items()}}


def demo_part(scale: Scale) -> tuple[Part, dict[str, Any]]:
    """The demo model, computed; with further figures."""
    generated = BUILD / "repository"
    config = model_config.read(generated / systems.SERVED / "config.pbtxt")
    parameters = model_config.parameters(config)
    folder = (generated / systems.SERVED).resolve()
    serving = settings.read(TokenAdaptSettings, parameters)
    model = open_vision_model(ModelArgs("demo", folder, {}, parameters, "CPU", 0), serving)
    model.reload_tasks()
    costs = costs_of(model, serving, None)
    profiled = costs.throughput(costs.max_size)[0]
    repository = FOLDER / "token-demo"
    systems.publish_engines([PETS], generated, repository)
    with running_server([PETS.slug], (repository,)) as server:
        capacity = measure_capacity(server.grpc_url, PETS.slug, model, scale.demo_s / 2)
    what = f"demo, {parameters['precision']}"
    part = Part(what, model, scale, scale.demo_s, capacity, max(1.0, profiled / capacity))
    # The gamma that removes about the share of tokens that -15 removes of the paper's 197.
    tokens = model.profiles[0].tokens
    like_15 = min(model.gammas, key=lambda gamma: abs(gamma / tokens + 15 / 197))
    best = {load: systems.fixed(part.best(load)) for load in part.loads}
    schemes = _by_name([OURS, PAPER, PETS, systems.fixed(like_15), *best.values()])
    systems.publish_engines(list(schemes.values()), generated, repository)
    with running_server([scheme.slug for scheme in schemes.values()], (repository,)) as server:

        def of(load: str) -> Sequence[Scheme]:
            further = [systems.fixed(like_15)] * load.startswith("1.2")
            return list(_by_name([OURS, PAPER, PETS, best[load], *further]).values())

        part.measure(server.grpc_url, of, 1)
    tasks = {name: task.name for name, task in representatives(model.tasks).items()}
    rates = {"images/s at gamma 0": round(capacity, 1), "of the engine alone, as profiled": round(profiled, 1)}
    return part, {**rates, "tasks": tasks, "for -15": like_15}


def _by_name(schemes: Sequence[Scheme]) -> Mapping[str, Scheme]:
    """Each scheme once, in the order of first mention."""
    return {scheme.name: scheme for scheme in schemes}


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.token_adapt", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: one seed, one rate, short cells")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--seeds", help="some of those of the whole run, 0,1")
    parser.add_argument("--profile", type=Path, default=vit_base.PROFILE, help="latencies of ViT-Base")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: got {unknown[0]}; some of {', '.join(PARTS)}")
    scale, start = QUICK if options.quick else FULL, time.monotonic()
    if options.seeds:
        scale = replace(scale, seeds=tuple(map(int, options.seeds.split(","))))
    settings = {
        "seeds": ",".join(map(str, scale.seeds)),
        "cells": f"emulated {scale.emulated_s:g} s, demo {scale.demo_s:g} s, after {scale.warm_up_s:g} s of warm-up",
    }
    output = Output("token_adapt", settings, name_of_parts("token_adapt", names, PARTS))
    output.data |= {"cells": [], "ratios": []}
    for name in names:
        part, further = emulated_part(scale, options.profile) if name == "emulated" else demo_part(scale)
        output.say(report.tables(part.results))
        output.say("\n" + ", ".join(f"{key}: {value}" for key, value in further.items()))
        output.data["cells"] += report.records(part.results)
        output.data["ratios"] += [{"what": part.results.what, **row} for row in report.ratios(part.results)]
    output.say(f"\ntook {time.monotonic() - start:.0f} s")
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
