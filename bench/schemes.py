"""The schemes that are compared, each as parameters of a front and as a scheme of the simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.fleet import Measured
from shapeshift.simulate.scenario import Model, Scheme


@dataclass(frozen=True)
class Named:
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


PAPER = Named("exact", "clamped", False, "multilevel")
OURS = Named("exact", "md1", True, "earliest_finish", 2.0)
ALLOCATIONS: Mapping[str, Named] = {
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
INFAAS = Named("global", "clamped", False, "bin_packing")
"""INFaaS' dispatch over counts that are fixed once: its scaling is of numbers, not of bins."""


def schemes() -> dict[str, Named]:
    """Every allocation with every dispatch, and INFaaS; the paper's own and ours among them."""
    found = {
        f"{allocation} + {dispatch}": replace(named, dispatch=algorithm)
        for allocation, named in ALLOCATIONS.items()
        for dispatch, algorithm in DISPATCHES.items()
    }
    return {**found, "INFaaS": INFAAS}


def model(curve: Measured, edges: tuple[int, ...], slo_ms: float) -> Model:
    """What the simulation serves: the measured curve at the bins' edges."""
    return Model(edges, tuple(curve.at(edge) for edge in edges), slo_ms)
