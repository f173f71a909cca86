"""One part of `bench.token_adapt`: its loads, the utility of fixed gammas by simulation, and its schemes' cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.common.output import progress
from bench.token_adapt import cells, systems
from bench.token_adapt.loads import Traffic, bursty, fluctuating, simulated
from bench.token_adapt.report import Results
from bench.token_adapt.systems import Scheme
from shapeshift import settings
from shapeshift.simulate.token_adapt import run as simulate
from shapeshift.token_adapt.front import costs_of
from shapeshift.token_adapt.interfaces import ImageModel
from shapeshift.token_adapt.settings import TokenAdaptSettings

BURSTY = "bursty, 0.75 times capacity"


@dataclass(frozen=True)
class Scale:
    """How much is measured. rates: in capacities; at_once: emulated schemes that are measured at the same time."""

    seeds: tuple[int, ...]
    warm_up_s: float
    emulated_s: float
    demo_s: float
    rates: tuple[float, ...]
    bursty: bool
    at_once: int = 3


QUICK = Scale((0,), 3.0, 12.0, 7.0, (1.2,), False)
FULL = Scale((0, 1), 10.0, 60.0, 18.0, (0.8, 1.2, 2.0), True)


class Part:
    """One part of the benchmark: a model, the schemes over it, and the loads.

    capacity: images a second at gamma 0; slower: the time of batches over the profiled time.
    """

    def __init__(
        self,
        what: str,
        model: ImageModel,
        scale: Scale,
        seconds: float,
        capacity: float,
        slower: float = 1.0,
    ) -> None:
        self.results = Results(what)
        self.model, self.scale = model, scale
        self.seconds = scale.warm_up_s + seconds
        self.capacity, self.slower = capacity, slower
        self.fixed = {load: self._simulated(load) for load in self.loads}

    @property
    def loads(self) -> dict[str, Callable[[int], Traffic]]:
        """The traffic of each load by seed."""
        loads: dict[str, Callable[[int], Traffic]] = {}
        for factor in self.scale.rates:
            loads[f"{factor:g} times capacity"] = lambda seed, rate=factor * self.capacity: fluctuating(  # type: ignore[misc]
                rate, self.seconds, seed
            )
        if self.scale.bursty:
            loads[BURSTY] = lambda seed: bursty(0.75 * self.capacity, self.seconds, seed)
        return loads

    def best(self, load: str) -> int:
        """The fixed gamma that gains the most utility by simulation."""
        return max(self.fixed[load], key=self.fixed[load].__getitem__)

    def measure(self, url: str, schemes: Callable[[str], Sequence[Scheme]], at_once: int) -> None:
        """Measure all cells; each seed has its own order of the schemes of a load."""
        for seed in self.scale.seeds:
            for load, traffic in self.loads.items():
                chosen = list(schemes(load))
                np.random.default_rng(seed).shuffle(chosen)  # type: ignore[arg-type]
                for first in range(0, len(chosen), at_once):
                    group = chosen[first : first + at_once]
                    progress(f"{load}, seed {seed}: {', '.join(scheme.name for scheme in group)}")
                    self.results.cells += cells.run(
                        url, load, seed, traffic(seed), group, self.model, self.scale.warm_up_s
                    )

    def _simulated(self, load: str) -> dict[int, float]:
        """The share of utility that each fixed gamma gains in a simulation of the same requests."""
        traffic = [self.loads[load](seed) for seed in self.scale.seeds]
        gained = {}
        for gamma in self.model.gammas:
            serving = settings.read(TokenAdaptSettings, systems.fixed(gamma).parameters)
            shares = []
            for one in traffic:
                costs = costs_of(self.model, serving, None)
                costs.measured.value = self.slower
                offered = simulated(one, self.model.tasks, (gamma,))
                result = simulate(costs, serving, offered)
                shares.append(result.total_utility(offered) / float(offered.utility.sum()))
            gained[gamma] = float(np.mean(shares))
        return gained
