"""The allocation and dispatch schemes that are compared, for a front and for the simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.polymorph.fleet import LatencyCurve
from shapeshift.simulate.scenario import Model, Scheme


@dataclass(frozen=True)
class SchemeSettings:
    """As in PolymorphSettings."""

    allocation: str
    curve: str
    dispatch: str

    def parameters(self) -> dict[str, str]:
        """For a front's config.pbtxt."""
        return dataclasses.asdict(self)

    def simulated(self, period_s: float, change_s: float) -> Scheme:
        """For the simulation."""
        return Scheme(self.allocation, self.curve, self.dispatch, period_s, change_s)


PAPER = SchemeSettings("exact", "clamped", "multilevel")
OURS = SchemeSettings("exact", "md1", "earliest_finish")
ALLOCATIONS: Mapping[str, SchemeSettings] = {
    "even": replace(PAPER, allocation="even"),
    "global": replace(PAPER, allocation="global"),
    "solved, paper's curve": PAPER,
    "solved, M/D/1": replace(OURS, dispatch="multilevel"),
}
DISPATCHES: Mapping[str, str] = {
    "intra-group": "intra_group",
    "inter-group": "inter_group",
    "Algorithm 1": "multilevel",
    "earliest finish": "earliest_finish",
}
INFAAS = SchemeSettings("global", "clamped", "bin_packing")
"""INFaaS' dispatch over fixed counts: INFaaS scales the number of instances, not their bins."""


def model(curve: LatencyCurve, edges: tuple[int, ...], slo_ms: float) -> Model:
    """The model that the simulation serves: the measured curve at the edges of the bins."""
    return Model(edges, tuple(curve.at(edge) for edge in edges), slo_ms)
