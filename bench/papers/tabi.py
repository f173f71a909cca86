"""Tabi: its Tables 2, 3 and 5 and Figs. 8 and 9, one query at a time, by the routing that serves.

The paper's models take the times of its Tables 1 and 2; confidences are laws that give the shares of early answers that
it states (Fig. 8). Ours are the models of checkpoints/text-classifiers: their candidate table, and the last run of
`bench.cascade` on them (bench/results).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from bench.papers.findings import OTHER, Findings, verdict
from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import Candidate, Gap
from shapeshift.cascade.policy import routing
from shapeshift.simulate.cascade import CascadeLaw, SimulationResult, drawn_confidence, run
from shapeshift.workloads.trace import Trace

CUTOFFS = (0.75, 0.85, 0.95)
_K = 10.0
_CONTROL_MS = 1.0
"""The paper states at most 5."""
_CONTROL = CascadeLaw(candidates="", control_ms=_CONTROL_MS, hop_ms=0.0)
_QUERIES, _FEWER = 20_000, 5_000
_APART = Trace(np.arange(_QUERIES) * 1.0, np.ones(_QUERIES, np.int64))
"""One query at a time."""
_TABLE = Path("checkpoints/text-classifiers/candidates")
_RESULT = Path("bench/results/cascade.json")


@dataclass(frozen=True)
class Task:
    """A task of the paper. ms: of the small and the large model alone; early: answered by the small one at `CUTOFFS`;
    sure: of the queries above a confidence of 0.9; c: the paper's choice; pruned: of the large model's time; said: mean
    ms of INFaaS and of Tabi."""

    name: str
    classes: int
    ms: tuple[float, float]
    early: tuple[float, ...]
    sure: float
    c: float
    pruned: float
    said: tuple[float, float]

    def confidences(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Drawn from a law of steps that gives `early` and `sure` as nearly as any does."""
        edges = np.array([1 / self.classes, *np.arange(0.5, 0.9, 0.05), *np.arange(0.9, 1.0, 0.01), 1.0])
        edges = np.unique(edges[edges >= 1 / self.classes].round(4))
        middles = (edges[:-1] + edges[1:]) / 2
        early = [[1 - routing.sigmoid(one, c, _K) for one in middles] for c in CUTOFFS]
        law, _ = nnls(np.array([*early, middles > 0.9, np.full(len(middles), 10.0)]), [*self.early, self.sure, 10.0])
        chosen = rng.choice(len(law), count, p=law / law.sum())
        confidences: NDArray[np.float64] = middles[chosen]
        return confidences


TASKS = (
    Task("SST-2", 2, (7.0, 22.0), (0.924, 0.874, 0.698), 0.89, 0.95, 0.17, (22.0, 13.2)),
    Task("MNLI", 3, (7.0, 25.8), (0.594, 0.494, 0.160), 0.52, 0.85, 0.154, (25.8, 20.3)),
)
_THREE_MS, _THREE_SHARES, _THREE_MEAN_MS = 20.0, (0.456, 0.368, 0.176), 22.0


def measure(findings: Findings, seed: int) -> None:
    """All of them."""
    rng = np.random.default_rng(seed)
    results = {task.name: _two_levels(findings, task, rng) for task in TASKS}
    _three_levels(findings, results["MNLI"], rng)
    _measured(findings)
    _cutoffs(findings, rng)


def _run(latencies: Sequence[float], confidence: NDArray[np.float64], c: float) -> SimulationResult:
    gap = Gap(c, _K, "sigmoid", 0.0, 0.5)
    levels = tuple(f"level {number}" for number in range(len(latencies)))
    nothing = (0.0,) * len(levels)
    candidate = Candidate(
        *("a cascade", levels, (gap,) * (len(levels) - 1), 0.0, 0.0, 0.0, 0.0, tuple(latencies), nothing, 0.0, 0.0)
    )
    return run(_CONTROL, candidate, confidence, _APART)


def _row(result: SimulationResult) -> dict[str, float]:
    quarter, half, most = np.percentile(result.latency_ms, [25, 50, 99]).tolist()
    early = float((result.level == 1).mean())
    return {"early": early, "mean ms": float(result.latency_ms.mean()), "p25": quarter, "p50": half, "p99": most}


def _two_levels(findings: Findings, task: Task, rng: np.random.Generator) -> dict[str, float]:
    """Table 2 and Fig. 8."""
    small, large = task.ms
    confidence = task.confidences(rng, _QUERIES)[None]
    rows = {c: _row(_run((small, large * (1 - task.pruned)), confidence, c)) for c in CUTOFFS}
    findings.table("Fig. 8", f"{task.name}, the paper's times", [{"c": c, **row} for c, row in rows.items()])
    ours, (infaas, tabi) = rows[task.c], task.said
    findings.claim(
        "Table 2",
        f"{task.name}: {tabi} ms in the mean, INFaaS {infaas}: lower by {1 - tabi / infaas:.0%}",
        f"{ours['mean ms']:.1f} ms at c = {task.c}, lower by {1 - ours['mean ms'] / infaas:.0%}",
        verdict(abs(ours["mean ms"] / tabi - 1) < 0.1),
        f"control is taken to be {_CONTROL_MS:g} ms a level; accuracies need the paper's models",
    )
    findings.claim(
        "Fig. 8",
        f"{task.name}: early answers {', '.join(f'{share:.1%}' for share in task.early)} at c = 0.75, 0.85, 0.95",
        ", ".join(f"{row['early']:.1%}" for row in rows.values()),
        verdict(*(abs(row["early"] - share) < 0.03 for row, share in zip(rows.values(), task.early, strict=True))),
        "one law of confidences, fitted, gives all of them by Eq. 4",
    )
    return ours


def _three_levels(findings: Findings, two: Mapping[str, float], rng: np.random.Generator) -> None:
    """Table 5: of the queries that the first level does not answer, the second passes on the stated share."""
    first, _, last = _THREE_SHARES
    shares = (1 - first, last / (1 - first))
    confidence = np.array([np.where(rng.random(_QUERIES) < share, 0.0, 1.0) for share in shares])
    small, large = TASKS[1].ms
    three = _row(_run((small, _THREE_MS, large), confidence, 0.85))
    findings.table("Table 5", "MNLI", [{"levels": 2, **two}, {"levels": 3, **three}])
    tail, mean = three["p99"] / two["p99"] - 1, three["mean ms"] / two["mean ms"] - 1
    findings.claim(
        "Table 5",
        f"three levels: the mean grows by 8.4% to {_THREE_MEAN_MS:g} ms, the 99th percentile by 70.3%",
        f"{mean:+.1%} to {three['mean ms']:.1f} ms, {tail:+.1%}",
        verdict(mean > 0, tail > 0.5),
        "the paper's shares are put in",
    )


def _measured(findings: Findings) -> None:
    """Tables 2 and 3 by our models, as `bench.cascade` measured them."""
    result = json.loads(_RESULT.read_text(encoding="utf-8"))
    rows = {row["system"]: row for row in result["tables"]["clinc150"]}
    large, ours = rows["always large"], rows["ours"]
    findings.claim(
        "Table 2",
        "CLINC150: 14.8 ms, INFaaS 21.3 (-30%), 97.0% right against 97.3%",
        f"our classifiers: {ours['of the first'] - 1:+.0%}, {ours['accuracy']:.1%} against "
        f"{large['accuracy']:.1%}, {ours['early']:.0%} early",
        verdict(ours["of the first"] < 0.8, ours["accuracy"] > large["accuracy"] - 0.01),
        f"measured {result['date']} by bench.cascade",
    )
    for where, claim, why in (
        ("Table 3", "14% of words pruned, 15 to 17% less time, 0.3% less right", "ours leave all words"),
        ("Fig. 9", "alpha 0.5, 0.7, 0.9 prune 3.8, 14.2, 62.5% of SST-2's words", "needs the paper's models"),
    ):
        findings.claim(where, claim, "ours prune nothing", OTHER, why)


def _cutoffs(findings: Findings, rng: np.random.Generator) -> None:
    """Fig. 8 by our models: the profiled candidates, and the simulation beside them."""
    serving = candidates.serving(_TABLE, "clinc150")
    table, rows = serving.table, []
    confidence = drawn_confidence(table, table.models[0].name, _FEWER, rng)[None]
    for one in table.candidates:
        if one.gaps:
            result = _row(run(replace(_CONTROL, control_ms=0.02), one, confidence, _APART.until(_FEWER)))
            profiled = {"accuracy": one.accuracy, "early": one.shares[0], "mean ms": one.latency_ms, "p99": one.p99_ms}
            rows.append({"c": one.gaps[0].c, **profiled, **{f"simulated {n}": result[n] for n in ("early", "mean ms")}})
    findings.table("Fig. 8", "CLINC150, our models: profiled, and simulated from their reliability", rows)
    worst = max(abs(row["simulated mean ms"] / row["mean ms"] - 1) for row in rows)
    accuracy = [row["accuracy"] for row in rows]
    findings.claim(
        "Fig. 8",
        "with c accuracy and time grow, early answers become fewer",
        f"CLINC150: {accuracy[0]:.1%} to {max(accuracy):.1%} right, "
        f"{rows[0]['early']:.0%} to {rows[-1]['early']:.0%} early; simulated means within {worst:.0%}",
        verdict(
            *(np.diff([row["mean ms"] for row in rows]).min() > 0, np.diff([row["early"] for row in rows]).max() < 0),
            np.polyfit([row["c"] for row in rows], accuracy, 1)[0] > 0,
        ),
    )
