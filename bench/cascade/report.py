"""The tables of `bench.cascade`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.cascade.measurements import Answers, InputKey, Measurements, input_key
from bench.common.output import Row
from shapeshift.cascade.candidates import Candidate
from shapeshift.cascade.policy import calibration
from shapeshift.cascade.policy.routing import Array


@dataclass(frozen=True)
class System:
    """One system and its answers."""

    name: str
    answers: Answers

    @property
    def mean_ms(self) -> float:
        return float(self.answers.ms.mean())

    def row(self, base: System) -> Row:
        """Its figures, and its mean time over `base`'s. Times are those of engines and control."""
        answers = self.answers
        p25, p50, p75, p99 = np.percentile(answers.ms, [25, 50, 75, 99]).tolist()
        values = {"accuracy": float(answers.right.mean()), "mean_ms": self.mean_ms}
        values |= {"p25": p25, "p50": p50, "p75": p75, "p99": p99, "early": float((answers.level == 1).mean())}
        values |= {"control_ms_p50": float(np.median(answers.control_ms)), "of the first": self.mean_ms / base.mean_ms}
        return {"system": self.name, **{name: round(value, 4) for name, value in values.items()}}


def difference(ours: System, base: System) -> str:
    """The points by which `ours` is more accurate than `base`, with the interval (90%) on other texts of the kind."""
    points = 100 * (ours.answers.right - base.answers.right)
    mean, spread = float(points.mean()), 1.645 * float(points.std()) / len(points) ** 0.5
    return (
        f"  {ours.name} against {base.name}: {mean:+.2f} points ({mean - spread:+.2f} to {mean + spread:+.2f}) at "
        f"{ours.mean_ms / base.mean_ms:.2f} of its mean time"
    )


def pruning(measured: Measurements, ours: Answers, candidate: Candidate) -> str:
    """The effect of the candidate's pruning on the time and accuracy of its last model, on the texts that go on in
    `ours` (Table 3)."""
    onward = np.flatnonzero(ours.level > 1)
    key, alpha = input_key(candidate, len(candidate.levels) - 1), candidate.gaps[0].alpha
    if not len(onward) or not alpha:
        return "  no word was pruned"
    whole = np.array([measured.outputs[InputKey(key.model)][row][1] for row in onward])
    left = np.array([measured.outputs[key][row][1] for row in onward])
    words = sum(len(text.split()) for row in onward for text in measured.texts[row])
    gone = sum(measured.pruned[key.pruner, alpha][row] for row in onward)
    loss = _right(measured, InputKey(key.model))[onward].mean() - _right(measured, key)[onward].mean()
    return (
        f"  alpha {alpha:g}: {gone / words:.1%} of words pruned; large {whole.mean():.3f} > {left.mean():.3f} ms "
        f"({100 * (left.mean() / whole.mean() - 1):+.1f}%), its accuracy {100 * -loss:+.2f} points"
    )


def calibration_error(ours: Answers) -> str:
    """The expected calibration error of the CONFIDENCE output on these texts."""
    errors = []
    for what, chosen in (("level 1", ours.level == 1), ("ensemble", ours.level > 1), ("all", ours.level > 0)):
        if chosen.any():
            reliability = calibration.reliability(ours.confidence[chosen], ours.right[chosen])
            errors.append(f"{what} {calibration.expected_calibration_error(reliability):.4f}")
    return f"  expected calibration error of CONFIDENCE: {', '.join(errors)}"


def _right(measured: Measurements, key: InputKey) -> Array:
    answers = np.array([level.logits.argmax() for level, _ in measured.outputs[key]])
    return np.asarray(answers == measured.truth, dtype=float)
