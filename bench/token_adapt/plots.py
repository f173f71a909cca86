"""The paper's Figs. 4, 7 and 9 to 13, drawn from a run of `bench.token_adapt`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.plots import figure
from bench.token_adapt.report import Results, gamma_shares
from bench.token_adapt.systems import OURS_NAME
from shapeshift.token_adapt.interfaces import ImageModel

Draw = Callable[[Any], None]
_TYPES = ("in time, right", "in time, wrong", "late", "evicted")


def draw(
    name: str, model: ImageModel, results: Results, fixed: Mapping[str, Mapping[int, float]], folder: Path
) -> None:
    """Draw all figures into `folder`. fixed: the utility share of each fixed gamma by load, simulated."""
    loads = len(results.loads)
    figures: dict[str, tuple[int, Draw]] = {
        "fig4": (2, partial(_fig4, model)),
        "fig7": (1, partial(_fig7, model)),
        "fig9": (loads, partial(_by_load, results, _fig9)),
        "fig10": (loads, partial(_fig10, results, fixed)),
        "fig11": (loads, partial(_by_load, results, _fig11)),
        "fig12": (loads, partial(_by_load, results, _fig12)),
        "fig13": (loads, partial(_by_load, results, _fig13)),
    }
    for number, (count, draw_panels) in figures.items():
        with figure(folder / f"token_adapt-{name}-{number}.png", count, (5.5 * count, 4.0), results.what) as panels:
            draw_panels(panels)


def _fig4(model: ImageModel, panels: Any) -> None:
    """Accuracy and throughput by gamma."""
    accuracy, throughput = panels
    for task in model.tasks.values():
        accuracy.plot(model.gammas, [task.accuracy[gamma] for gamma in model.gammas], marker="o", label=task.name)
    accuracy.set(xlabel="gamma", ylabel="accuracy")
    accuracy.legend(fontsize=8)
    best = [max(n / ms for n, ms in model.profiles[gamma].latency_ms.items()) * 1e3 for gamma in model.gammas]
    throughput.plot(model.gammas, best, marker="o")
    throughput.set(xlabel="gamma", ylabel="images a second", ylim=(0, None))


def _fig7(model: ImageModel, panels: Any) -> None:
    """Throughput by batch size."""
    for gamma in model.gammas:
        points = sorted(model.profiles[gamma].latency_ms.items())
        panels[0].plot([n for n, _ in points], [n / ms * 1e3 for n, ms in points], marker="o", label=f"gamma {gamma}")
    panels[0].set(xlabel="images a batch", ylabel="images a second", ylim=(0, None))
    panels[0].legend(fontsize=7)


def _by_load(results: Results, draw: Callable[[Results, str, Any], None], panels: Any) -> None:
    for panel, load in zip(panels, results.loads, strict=True):
        draw(results, load, panel)
        panel.set_title(load, fontsize=9)


def _fig9(results: Results, load: str, panel: Any) -> None:
    """Utility gained by time, the first seed."""
    for scheme in results.schemes(load):
        cell = results.of(load, scheme)[0]
        panel.plot(cell.at_s - cell.at_s[0], np.cumsum(cell.gained), label=scheme)
    panel.set(xlabel="s", ylabel="utility")
    panel.legend(fontsize=7)


def _fig10(results: Results, fixed: Mapping[str, Mapping[int, float]], panels: Any) -> None:
    """Utility of every fixed gamma (simulated), and ours (measured)."""
    for panel, load in zip(panels, results.loads, strict=True):
        shares = fixed[load]
        panel.bar([str(gamma) for gamma in shares], list(shares.values()), label="fixed gamma, simulated")
        panel.axhline(results.share(load, OURS_NAME), color="black", label="ours")
        panel.set(xlabel="gamma", ylabel="share of the utility offered", ylim=(0, 1), title=load)
        panel.legend(fontsize=7)


def _fig11(results: Results, load: str, panel: Any) -> None:
    """The distribution of accuracy over the requests served in time."""
    for scheme in results.schemes(load):
        served = np.sort(np.concatenate([cell.accuracy[cell.in_time] for cell in results.of(load, scheme)]))
        if len(served):
            panel.plot(served, np.arange(1, len(served) + 1) / len(served), label=scheme)
    panel.set(xlabel="accuracy", ylabel="share of those served in time")
    panel.legend(fontsize=7)


def _fig12(results: Results, load: str, panel: Any) -> None:
    """The gammas that ours chooses."""
    shares = gamma_shares(results.of(load, OURS_NAME))
    panel.bar([str(gamma) for gamma in shares], list(shares.values()))
    panel.set(xlabel="gamma", ylabel="share of the requests that ran")


def _fig13(results: Results, load: str, panel: Any) -> None:
    """Outcomes of the requests."""
    schemes = results.schemes(load)
    parts = np.array([np.mean([cell.types for cell in results.of(load, scheme)], axis=0) for scheme in schemes])
    below = np.zeros(len(schemes))
    for kind, values in zip(_TYPES, parts.T, strict=True):
        panel.bar(schemes, values, bottom=below, label=kind)
        below += values
    panel.tick_params(axis="x", rotation=45, labelsize=7)
    panel.legend(fontsize=7)
