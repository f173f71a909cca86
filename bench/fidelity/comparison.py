"""A served trace beside its simulation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common.output import Row
from bench.fidelity.calibration import toml
from shapeshift.simulate import scenario
from shapeshift.simulate.outcome import TAIL, Outcome
from shapeshift.workloads.load import CSV
from shapeshift.workloads.trace import Trace


def simulated(folder: Path, name: str, sections: Mapping[str, Mapping[str, object]], trace: Trace) -> Outcome:
    """What `shapeshift simulate` says of a trace: it and the scenario are written to `folder`, then read again."""
    file = folder / f"{name}.toml"
    trace.write(file.with_suffix(".csv"))
    load = {"arrivals": CSV, "trace": f"{name}.csv", "duration_s": float(trace.at_s[-1]) + 1}
    file.write_text(toml({"load": load, **sections}))
    case = scenario.read(file)
    return case.systems[scenario.BASE].serve(case.load.draw(case.seed))


def row(front: str, served_ms: NDArray[np.float64], outcome: Outcome, what: str = "") -> Row:
    """A row of the table. served_ms: of the requests, nan without an answer; what: begins the names of the figures."""
    answered = served_ms[~np.isnan(served_ms)]
    line: dict[str, object] = {"front": f"{front}, {what}token" if what else front, "requests": len(served_ms)}
    line["unanswered"] = len(served_ms) - len(answered)
    for figure, served in (("mean", answered.mean()), (f"p{TAIL:g}", np.percentile(answered, TAIL))):
        predicted = outcome.figures[f"{what}{figure} ms"]
        assert isinstance(predicted, float)
        line |= {
            f"{figure} ms": float(served),
            "simulated " + figure: predicted,
            f"{figure} off %": 100 * (predicted / served - 1),
        }
    return line
