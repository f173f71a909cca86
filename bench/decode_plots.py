"""The paper's Figs. 5 and 7, drawn from a run of `bench.fused_decode`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.decode_cells import INSTANCES, OURS, Bench
from bench.decode_loads import PAPER_ITERATIONS, PAPER_NEW


def all_of(bench: Bench, folder: Path) -> Sequence[str]:
    """Draw what was measured into `folder`; the files' names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for name, size, draw, measured in _FIGURES:
        if not measured(bench):
            continue
        figure, panels = pyplot.subplots(1, size, figsize=(6.5 * size, 4.2), squeeze=False)
        draw(bench, panels[0])
        figure.tight_layout()
        figure.savefig(folder / name, dpi=110)
        pyplot.close(figure)
        drawn.append(name)
    return drawn


def _fig5(bench: Bench, panels: Any) -> None:
    """Total time of all requests by mean gap, and iterations with their overlap beside the paper's."""
    known = _gaps(bench)
    times, counts = panels
    for system in (OURS, INSTANCES):
        spans = [(gap, bench.runs[load, system][0].span_s) for gap, load in known if bench.has(load, system)]
        if spans:
            times.plot(*zip(*spans, strict=True), marker="o", label=system)
    times.set(xlabel="the paper's mean gap, ms (scaled here)", ylabel="s until all are answered", xscale="log")
    times.set(yscale="log")
    times.legend()
    one = bench.scale.new
    ours = [(gap, float(bench.runs[load, OURS][0].replayed.extra["iterations"]) / one) for gap, load in known]
    paper = [(gap, stated / PAPER_NEW) for gap, stated in PAPER_ITERATIONS.items()]
    for label, points in (("ours", ours), ("the paper", paper)):
        counts.plot(*zip(*points, strict=True), marker="o", label=f"iterations, {label}")
    counts.set(xlabel="mean gap, ms", ylabel="iterations over those of one request", xscale="log", ylim=(0, None))
    overlap = counts.twinx()
    gaps, of_one = (np.array(column) for column in zip(*ours, strict=True))
    overlap.plot(gaps, 100 / of_one, color="tab:gray", linestyle="--", label="overlap, ours")
    overlap.set(ylabel="overlap, %", ylim=(0, 100))
    counts.legend(loc="upper center", fontsize=8)


def _fig7(bench: Bench, panels: Any) -> None:
    """Tokens generated until each instant, requests coming at a constant interval."""
    (panel,) = panels
    for (load, system), runs in bench.runs.items():
        if load == bench.constant:
            panel.plot(*runs[0].progress(), label=system)
            panel.set(title=load)
    panel.set(xlabel="s", ylabel="tokens generated", xlim=(0, None), ylim=(0, None))
    panel.legend(fontsize=8)


def _gaps(bench: Bench) -> list[tuple[int, str]]:
    """The paper's mean gaps, with the names of the loads that have them and that ours was measured under."""
    return [(gap, load) for gap, load in sorted(bench.poisson.items()) if bench.has(load, OURS)]


_FIGURES = (
    ("fused_decode_fig5.png", 2, _fig5, _gaps),
    ("fused_decode_fig7.png", 1, _fig7, lambda bench: bench.has(bench.constant, OURS)),
)
