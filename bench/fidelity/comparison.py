"""A served trace beside its simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.common.output import Row
from bench.fidelity.calibration import toml
from bench.fidelity.fronts import Front, Sections, Sent
from shapeshift.simulate import scenario
from shapeshift.simulate.outcome import TAIL, Outcome
from shapeshift.workloads.load import CSV


def simulated(folder: Path, name: str, sections: Sections, sent: Sent) -> Outcome:
    """What `shapeshift simulate` says of a trace: it and the scenario are written to `folder`, then read again."""
    file, trace = folder / f"{name}.toml", sent.trace
    trace.write(file.with_suffix(".csv"))
    load = {"arrivals": CSV, "trace": f"{name}.csv", "duration_s": float(trace.at_s[-1]) + 1}
    if sent.loaded:
        (place,) = sections
        sections = {place: {**sections[place], "loaded": [*sent.loaded]}}
    file.write_text(toml({"load": load, **sections}))
    case = scenario.read(file)
    return case.systems[scenario.BASE].serve(case.load.draw(case.seed))


def with_rest(folder: Path, front: Front, sections: Sections, like: Sequence[Sent]) -> Sections:
    """The sections with the time that these requests take in the mean beside all that is simulated: network, reading,
    answering, and waiting for a core meanwhile."""
    what, rest_ms = front.figures[-1], []
    for sent in like:
        mean_ms = simulated(folder, front.name, sections, sent).figures[f"{what}mean ms"]
        assert isinstance(mean_ms, float)
        rest_ms.append(float(np.nanmean(sent.of_figure(what))) - mean_ms)
    place = "sidecar" if "sidecar" in sections else next(iter(sections))
    return {**sections, place: {**sections[place], "overhead_ms": max(0.0, float(np.mean(rest_ms)))}}


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
