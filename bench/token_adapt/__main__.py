"""`classify_image` against other ways to serve it, in one run: `make bench BENCH=token_adapt`.

    ours               the plan over all gammas at every step
    gamma 0 (PetS)     the plain model, by deadline
    plain model, ...   our plan with gamma 0 alone: the gain of choosing batches without choosing gammas
    gamma ...          one gamma for all: the best one by simulation, and -15
    the paper's OTAS   Algorithms 2 and 3, batches of up to 64
    INFaaS             three sizes of ViT, one loaded at a time, changed by the rate; loading takes as long as reading
                       their weights takes here

The real server over models that wait for latencies of ViT-Base, scaled so that gamma 0 serves 50 images a second, with
accuracies after the paper's description of its Fig. 4, and the paper's Table II. Utility is expected utility: an image
that is in time by the client's clock counts its utility times the profiled accuracy of its task at the gamma that
served it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from bench.common.cells import Cells
from bench.common.output import FOLDER, Output, parser, program
from bench.common.server import running_server
from bench.token_adapt import cells, systems, vit_base
from bench.token_adapt.loads import accuracies, bursty, fluctuating
from bench.token_adapt.systems import OURS, PAPER, PETS, PLANNED, Scheme
from shapeshift import settings
from shapeshift.simulate.token_adapt import run as simulate
from shapeshift.token_adapt.executor import ImageModel
from shapeshift.token_adapt.front import costs_of
from shapeshift.token_adapt.settings import TokenAdaptSettings
from shapeshift.workloads.trace import Trace

AT_ONCE = 3
"""Schemes that are measured at the same time: they wait, and compute nothing."""


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parse = parser("token_adapt", __doc__, "under 3 minutes: one seed, one rate, short cells")
    parse.add_argument("--rounds", type=int, default=2, help="each with another seed (%(default)s)")
    options, start_s = parse.parse_args(), time.monotonic()
    seeds = range(options.seed, options.seed + (1 if options.quick else options.rounds))
    warm_up_s, seconds = (3.0, 12.0) if options.quick else (10.0, 60.0)
    rates = (1.2,) if options.quick else (0.8, 1.2, 2.0)
    loads: dict[str, Callable[[int], Trace]] = {
        f"{rate:g} times capacity": partial(fluctuating, rate * vit_base.CAPACITY_PER_S, warm_up_s + seconds)
        for rate in rates
    }
    if not options.quick:
        loads["bursty, 0.75 times capacity"] = partial(bursty, 0.75 * vit_base.CAPACITY_PER_S, warm_up_s + seconds)
    model = vit_base.model()
    sizes, tasks = vit_base.sizes(model)
    switch_ms = vit_base.load_ms(FOLDER / "token-weights")
    common = [OURS, PAPER, PETS, systems.infaas(sizes, tasks, switch_ms), systems.fixed(-15)]
    of_load = {
        load: _by_name([*common, *[PLANNED] * load.startswith("1.2"), best_fixed(model, [traffic(s) for s in seeds])])
        for load, traffic in loads.items()
    }
    about = {"seeds": ",".join(map(str, seeds)), "cells": f"{seconds:g} s, after {warm_up_s:g} s of warm-up"}
    output = Output("token_adapt", about)
    results = Cells(cells.figures)
    schemes = {name: scheme for chosen in of_load.values() for name, scheme in chosen.items()}
    repository = FOLDER / "token-emulated"
    systems.publish(list(schemes.values()), model, repository)
    with running_server([scheme.slug for scheme in schemes.values()], (repository,)) as server:
        for seed in seeds:
            for load, traffic in loads.items():
                order = np.random.default_rng(seed).permutation(list(of_load[load])).tolist()
                for first in range(0, len(order), AT_ONCE):
                    group = [schemes[name] for name in order[first : first + AT_ONCE]]
                    cells.run(results, server.grpc_url, load, traffic(seed), group, model, warm_up_s)
    what = f"emulated ViT-Base ({vit_base.PROFILE.name})"
    output.say(results.tables(f"{what}, "))
    output.table(f"{what}: utility of ours over others'", cells.ratios(results))
    loaded = ", ".join(f"{vit_base.SIZES[size][0]} {ms:.0f} ms" for size, ms in switch_ms.items())
    output.say(f"\nINFaaS loads {loaded}; took {time.monotonic() - start_s:.0f} s")
    output.data["cells"] = [{"what": what, **row} for row in results.records()]
    output.data["ratios"] = [{"what": what, **row} for row in cells.ratios(results)]
    output.save()
    return 0


def best_fixed(model: ImageModel, traces: list[Trace]) -> Scheme:
    """The fixed gamma that gains the most utility in a simulation of the same requests."""

    def gained(gamma: int) -> float:
        serving = settings.read(TokenAdaptSettings, systems.fixed(gamma).parameters)
        offered = [(trace, accuracies(trace, model.tasks, (gamma,))) for trace in traces]
        return sum(simulate(costs_of(model, serving, None), serving, *one).total_utility(*one) for one in offered)

    return systems.fixed(max(model.gammas, key=gained))


def _by_name(schemes: list[Scheme]) -> Mapping[str, Scheme]:
    """Each scheme once, in the order of first mention."""
    return {scheme.name: scheme for scheme in schemes}


if __name__ == "__main__":
    sys.exit(main())
