"""The allocation and dispatch schemes that are compared, for a front and for the simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.polymorph.fleet import LatencyCurve
from shapeshift.simulate.scenario import Model, Scheme


@dataclass(frozen=True)
class SchemeSettings:
    """allocation, curve, cap_last, dispatch, drain: as in PolymorphSettings."""

    allocation: str
    curve: str
    cap_last: bool
    dispatch: str
    drain: float = 0.0

    def parameters(self) -> dict[str, str]:
        """For a front's config.pbtxt."""
        cap = "true" if self.cap_last else "false"
        return {
            "allocation": self.allocation,
            "curve": self.curve,
            "cap_last": cap,
            "dispatch": self.dispatch,
            "drain": f"{self.drain:g}",
        }

    def simulated(self, period_s: float, change_s: float) -> Scheme:
        """For the simulation."""
        return Scheme(self.allocation, self.curve, self.cap_last, self.drain, self.dispatch, period_s, change_s)


PAPER = SchemeSettings("exact", "clamped", False, "multilevel")
OURS = SchemeSettings("exact", "md1", True, "earliest_finish", 2.0)
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
INFAAS = SchemeSettings("global", "clamped", False, "bin_packing")
"""INFaaS' dispatch over fixed counts: INFaaS scales the number of instances, not their bins."""


def model(curve: LatencyCurve, edges: tuple[int, ...], slo_ms: float) -> Model:
    """The model that the simulation serves: the measured curve at the edges of the bins."""
    return Model(edges, tuple(curve.at(edge) for edge in edges), slo_ms)
