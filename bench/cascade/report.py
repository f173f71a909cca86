"""The tables of `bench.cascade`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cascade.measurements import Answers, InputKey, Measurements, input_key
from shapeshift.cascade.candidates import Candidate
from shapeshift.cascade.policy import calibration
from shapeshift.cascade.policy.routing import Array

_WIDTH = 34
_HEAD = (
    f"{'':{_WIDTH}}{'accuracy':>9}{'mean ms':>9}{'p25':>7}{'p50':>7}{'p75':>7}{'p99':>7}{'early':>7}"
    f"{'control':>9}{'cost':>8}"
)


@dataclass(frozen=True)
class Row:
    """One system and its answers."""

    name: str
    answers: Answers

    @property
    def accuracy(self) -> float:
        return float(self.answers.right.mean())

    @property
    def mean_ms(self) -> float:
        return float(self.answers.ms.mean())

    @property
    def cost(self) -> float:
        """Mean engine time over the packing factor, in ms."""
        return float(self.answers.cost.mean())

    def line(self, base: Row) -> str:
        """The row of a table, with its mean time over `base`'s."""
        own = self.answers
        quarters = np.percentile(own.ms, [25, 50, 75, 99])
        early = float((own.level == 1).mean())
        times = "".join(f"{value:7.2f}" for value in quarters)
        change = f"  {100 * (self.mean_ms / base.mean_ms - 1):+6.1f}%" if self is not base else ""
        return (
            f"{self.name:{_WIDTH}}{100 * self.accuracy:8.2f}%{self.mean_ms:9.3f}{times}{100 * early:6.1f}%"
            f"{float(np.median(own.control_ms)):9.3f}{self.cost:8.3f}{change}"
        )


def table(title: str, rows: list[Row]) -> str:
    """All systems, compared with the first. Times are those of engines and control."""
    return "\n".join([title, _HEAD + "  mean against the first", *(row.line(rows[0]) for row in rows)]) + "\n"


def by_level(measured: Measurements, ours: Answers, candidate: Candidate) -> list[str]:
    """Accuracy on the texts that return early and on those that go on (Tabi, section 7.3.2)."""
    early = ours.level == 1
    lines = []
    for what, rows in (("returned early", early), ("went on", ~early)):
        if rows.any():
            small, large = candidate.levels[0], candidate.levels[-1]
            of = {name: _right(measured, InputKey(name))[rows].mean() for name in (small, large)}
            lines.append(
                f"  {what:16}{rows.mean():7.1%} of texts: ours {ours.right[rows].mean():.2%}, small {of[small]:.2%}, "
                f"large {of[large]:.2%} (large less small {100 * (of[large] - of[small]):+.2f} points)"
            )
    return lines


def pruning(measured: Measurements, ours: Answers, candidate: Candidate) -> list[str]:
    """The effect of the candidate's pruning on the time and accuracy of its last model, on the texts that go on in
    `ours` (Table 3)."""
    onward = np.flatnonzero(ours.level > 1)
    if not len(onward):
        return ["  no text went on"]
    key, alpha = input_key(candidate, len(candidate.levels) - 1), candidate.gaps[0].alpha
    whole = np.array([measured.outputs[InputKey(key.model)][row][1] for row in onward])
    left = np.array([measured.outputs[key][row][1] for row in onward])
    words = sum(len(text.split()) for row in onward for text in measured.texts[row])
    gone = sum(measured.pruned[key.pruner, alpha][row] for row in onward)
    loss = _right(measured, InputKey(key.model))[onward].mean() - _right(measured, key)[onward].mean()
    return [
        f"  alpha {alpha:g}: {gone / words:.1%} of words pruned; large {whole.mean():.3f} > {left.mean():.3f} ms "
        f"({100 * (left.mean() / whole.mean() - 1):+.1f}%), its accuracy {100 * -loss:+.2f} points"
    ]


def bound(measured: Measurements, ours: Answers, candidate: Candidate) -> list[str]:
    """The measured mean against t_S + t_ctl + p t_L (1 - prune)."""
    onward = ours.level > 1
    key = input_key(candidate, len(candidate.levels) - 1)
    whole = np.array([ms for _, ms in measured.outputs[InputKey(key.model)]])
    t_small, t_large = (
        float(np.mean([ms for _, ms in measured.outputs[InputKey(candidate.levels[0])]])),
        float(whole.mean()),
    )
    p = float(onward.mean())
    left = np.array([ms for _, ms in measured.outputs[key]])
    saved = 1 - float(left[onward].mean() / whole[onward].mean()) if p else 0.0
    control = float(ours.control_ms.mean())
    expected = t_small + control + p * t_large * (1 - saved)
    return [
        f"  t_S {t_small:.3f}, t_L {t_large:.3f} (ratio {t_small / t_large:.2f}), p {p:.3f}, time pruned {saved:.1%}: "
        f"expected {expected:.3f}, measured {ours.ms.mean():.3f} ms ({100 * (ours.ms.mean() / expected - 1):+.1f}%); "
        f"always large less {100 * (1 - expected / t_large):.1f}%"
    ]


def levels(rows: list[Row]) -> list[str]:
    """The share of texts that each level of a cascade answers (Table 5)."""
    lines = []
    for row in rows:
        levels_of = range(1, int(row.answers.level.max()) + 1)
        shares = [f"{float((row.answers.level == level).mean()):.1%}" for level in levels_of]
        p99 = float(np.percentile(row.answers.ms, 99))
        lines.append(f"  {row.name}: answered by each level {', '.join(shares)}; p99 {p99:.3f} ms")
    return lines


def packing(factors: dict[str, int]) -> list[str]:
    """The packing factor of each model."""
    return [f"  packing factors: {', '.join(f'{name} {factor}' for name, factor in factors.items())}"]


def calibration_error(ours: Answers) -> list[str]:
    """The expected calibration error of the CONFIDENCE output on these texts."""
    lines = []
    for what, rows in (("level 1", ours.level == 1), ("ensemble", ours.level > 1), ("all", ours.level > 0)):
        if rows.any():
            error = calibration.expected_calibration_error(
                calibration.reliability(ours.confidence[rows], ours.right[rows])
            )
            lines.append(f"{what} {error:.4f}")
    return [f"  expected calibration error of CONFIDENCE: {', '.join(lines)}"]


def plain(row: Row) -> dict[str, Any]:
    """The row as a record."""
    own = row.answers
    p25, p50, p75, p99 = np.percentile(own.ms, [25, 50, 75, 99])
    values = {"accuracy": row.accuracy, "mean_ms": row.mean_ms, "p25": p25, "p50": p50, "p75": p75, "p99": p99}
    values |= {
        "early": float((own.level == 1).mean()),
        "control_ms_p50": float(np.median(own.control_ms)),
        "cost": row.cost,
    }
    return {"system": row.name, **{name: round(float(value), 4) for name, value in values.items()}}


def _right(measured: Measurements, key: InputKey) -> Array:
    answers = np.array([level.logits.argmax() for level, _ in measured.outputs[key]])
    return np.asarray(answers == measured.truth, dtype=float)
