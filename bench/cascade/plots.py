"""Plots of `bench.cascade`: accuracy against time, and the reliability of CONFIDENCE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cascade.report import Row
from bench.common.plots import figure
from shapeshift.cascade.policy import calibration


def draw(task: str, rows: Sequence[Row], folder: Path) -> str:
    """Draw one task's systems into `folder`; the file's name. One of `rows` has the name "ours"."""
    file = f"cascade-{task}.png"
    with figure(folder / file, 2, (11.0, 4.0), task) as (systems, reliability):
        _systems(systems, rows)
        _reliability(reliability, next(row for row in rows if row.name == "ours"))
    return file


def _systems(panel: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        panel.plot(row.mean_ms, 100 * row.accuracy, marker="o", linestyle="", label=row.name)
    panel.set(xlabel="mean engine and control time, ms", ylabel="accuracy, %")
    panel.legend(fontsize=7)


def _reliability(panel: Any, ours: Row) -> None:
    panel.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    answers = ours.answers
    for what, rows in (("level 1", answers.level == 1), ("ensemble", answers.level > 1)):
        bins = [one for one in calibration.reliability(answers.confidence[rows], answers.right[rows]) if one.count]
        error = calibration.expected_calibration_error(bins)
        confidence, right = ([getattr(one, side) for one in bins] for side in ("confidence", "accuracy"))
        panel.plot(confidence, right, marker="o", label=f"{what}: {int(rows.sum())} texts, error {error:.3f}")
    panel.set(xlabel="CONFIDENCE", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
    panel.legend(fontsize=8)
