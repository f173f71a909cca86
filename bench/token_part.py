"""One part of `bench.token_adapt`: its loads, what fixed gammas gain by simulation, and the cells of its schemes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import token_cells, token_systems
from bench.token_loads import Traffic, bursty, fluctuating, simulated
from bench.token_report import Results
from bench.token_systems import Scheme
from shapeshift.serving.model_args import ModelArgs
from shapeshift.simulate.token_adapt import run as simulate
from shapeshift.token_adapt import loading
from shapeshift.token_adapt.interfaces import ImageModel

BURSTY = "bursty, 0.75 times capacity"


@dataclass(frozen=True)
class Extent:
    """How much is measured; at_once: schemes that share the machine where they only wait."""

    seeds: tuple[int, ...]
    warm_up_s: float
    emulated_s: float
    demo_s: float
    rates: tuple[float, ...]
    bursty: bool
    at_once: int = 3


QUICK = Extent((0,), 3.0, 12.0, 7.0, (1.2,), False)
FULL = Extent((0, 1), 10.0, 60.0, 18.0, (0.8, 1.2, 2.0), True)


class Part:
    """One part of the bench: a model, the schemes over it, and the loads.

    capacity: images a second at gamma 0; images: of a request; slower: what batches take over what the profile says.
    """

    def __init__(
        self,
        what: str,
        model: ImageModel,
        extent: Extent,
        seconds: float,
        capacity: float,
        images: int = 1,
        slower: float = 1.0,
    ) -> None:
        self.results = Results(what)
        self.model, self.extent = model, extent
        self.seconds = extent.warm_up_s + seconds
        self.capacity, self.images, self.slower = capacity, images, slower
        self.fixed = {load: self._simulated(load) for load in self.loads}

    @property
    def loads(self) -> dict[str, Callable[[int], Traffic]]:
        """The traffic of each load by seed."""
        found: dict[str, Callable[[int], Traffic]] = {}
        for factor in self.extent.rates:
            found[f"{factor:g} times capacity"] = lambda seed, rate=factor * self.capacity: fluctuating(  # type: ignore[misc]
                rate, self.seconds, seed, self.images
            )
        if self.extent.bursty:
            found[BURSTY] = lambda seed: bursty(0.75 * self.capacity, self.seconds, seed, self.images)
        return found

    def best(self, load: str) -> int:
        """The fixed gamma that gains most by simulation."""
        return max(self.fixed[load], key=self.fixed[load].__getitem__)

    def measure(self, url: str, schemes: Callable[[str], Sequence[Scheme]], at_once: int) -> None:
        """All cells, the schemes of a load in another order for each seed."""
        for seed in self.extent.seeds:
            for load, traffic in self.loads.items():
                chosen = list(schemes(load))
                np.random.default_rng(seed).shuffle(chosen)  # type: ignore[arg-type]
                for first in range(0, len(chosen), at_once):
                    group = chosen[first : first + at_once]
                    sys.stderr.write(f"\r\033[K{load}, seed {seed}: {', '.join(scheme.name for scheme in group)}")
                    self.results.cells += token_cells.run(
                        url, load, seed, traffic(seed), group, self.model, self.extent.warm_up_s
                    )

    def _simulated(self, load: str) -> dict[int, float]:
        """The share of utility that each fixed gamma gains, as discrete events over the same requests."""
        traffic = [self.loads[load](seed) for seed in self.extent.seeds]
        found = {}
        for gamma in self.model.gammas:
            stated = token_systems.fixed(gamma).parameters
            shares = []
            for one in traffic:
                loaded = loading.load(_arguments(stated), lambda text: None, lambda args, own: self.model)
                loaded.costs.factor = self.slower
                offered = simulated(one, self.model.tasks, (gamma,))
                got = simulate(loaded.costs, loaded.rules, offered)
                shares.append(got.gained(offered) / float(offered.utility.sum()))
            found[gamma] = float(np.mean(shares))
        return found


def _arguments(parameters: Mapping[str, str]) -> ModelArgs:
    return ModelArgs("simulated", Path(), {}, parameters, "CPU", 0)
