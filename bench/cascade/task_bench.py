"""One task of `bench.cascade`: its profile, every system on the test set, and two systems through a server."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cascade import build, datasets, measurements, report
from bench.cascade.measurements import Answers, Measurements
from bench.cascade.report import System
from bench.common.output import Output, Row
from bench.common.server import loaded_server
from bench.common.systems import Outcome, TritonModel
from shapeshift.cascade.candidates import Candidate, CandidateTable, Gap
from shapeshift.cascade.policy import routing
from shapeshift.cascade.policy.selection import choose
from shapeshift.cascade.profiling import register
from shapeshift.cascade.profiling.observation import ModelRunner
from shapeshift.cascade.profiling.register import ProfilingSettings
from shapeshift.errors import NotFoundError
from shapeshift.progress import Progress
from shapeshift.workloads.arrivals import poisson

# The bound of a candidate's accuracy may be this much below that of the last model.
LOSS = 0.005
CUT, THREE = "cut", "three levels"
# The alpha that shows the effect of pruning if no candidate prunes.
ALPHA = 0.7


def profile(
    task: str, splits: datasets.Splits, engines: Path, names: Sequence[str], texts: int, seed: int
) -> CandidateTable:
    """The candidate table of models on so many texts of the validation part, by Eq. 4 and by the cut-off."""
    progress = Progress(task)
    table = register.profile(
        task,
        splits.val.subset(texts),
        engines,
        names,
        ProfilingSettings(algorithms=tuple(routing.ALGORITHMS), seed=seed),
        progress,
    )
    progress.done()
    return table


def chains(table: CandidateTable, levels: int, algorithm: str = "sigmoid") -> tuple[Candidate, ...]:
    """The cascades of so many levels that end in the last model."""
    chosen = [one for one in table.candidates if len(one.levels) == levels and one.levels[-1] == table.models[-1].name]
    return tuple(one for one in chosen if all(gap.algorithm == algorithm for gap in one.gaps))


def best(table: CandidateTable, candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest of `candidates` whose accuracy bound is at most half a point below the last model's, else the one
    with the greatest."""
    if not candidates:
        return None
    return choose(candidates, _least(table), 0.0).serving


def _least(table: CandidateTable) -> float:
    return table.candidate(table.models[-1].name).assured_accuracy - LOSS


def best_chain(table: CandidateTable) -> Candidate:
    """The best cascade of two levels. Raises NotFoundError if no model is faster and less accurate than the last."""
    candidate = best(table, chains(table, 2))
    if candidate is None:
        large = table.models[-1].name
        raise NotFoundError(f"no cascade of task {table.task}: no model is both faster and less accurate than {large}")
    return candidate


_WARM_UP = 50


def measure_served(
    engines: Mapping[str, int], large: str, front: str, repositories: Sequence[Path], texts: Sequence[str], seed: int
) -> list[Row]:
    """A row for each load and system: `front` against the model `large`, one text a request, each text once.

    engines: the number of engines of each later level. The open loop has half the rate of the large model alone.
    """
    with loaded_server({**engines, front: 0}, repositories) as server:
        systems = [
            TritonModel(name, server.grpc_url, model) for name, model in (("always large", large), ("ours", front))
        ]
        for system in systems:
            system.closed(texts, 1, _WARM_UP)
        # In turn, so that other load on the machine affects both.
        closed = [system.closed(texts, 1, len(texts)) for _ in range(2) for system in systems]
        rate = 0.5e3 / float(np.mean([closed[0].mean_ms, closed[2].mean_ms]))
        instants = poisson(rate, len(texts) / rate, np.random.default_rng(seed))
        sent = [texts[number % len(texts)] for number in range(len(instants))]
        opened = [system.open(sent, instants) for system in systems]
    return [*_rows("closed loop", closed[0::2], closed[1::2]), *_rows(f"open, {rate:.0f}/s", opened[:1], opened[1:])]


def _rows(load: str, large: Sequence[Outcome], ours: Sequence[Outcome]) -> list[Row]:
    rows: list[Row] = []
    base_ms = float(np.concatenate([one.latency_ms for one in large]).mean())
    for name, outcomes in (("always large", large), ("ours", ours)):
        times = np.concatenate([one.latency_ms for one in outcomes])
        p25, p50, p75, p99 = np.percentile(times, [25, 50, 75, 99]).tolist()
        row = {"system": name, "load": load, "mean_ms": float(times.mean()), "p25": p25, "p50": p50, "p75": p75}
        failed = sum(one.failed for one in outcomes)
        rows.append({**row, "p99": p99, "failed": failed, "of the first": float(times.mean()) / base_ms})
    return rows


class TaskBench:
    """One task: its profiled models, smallest first, and the candidate that serves."""

    def __init__(
        self,
        splits: datasets.Splits,
        engines: Path,
        table: CandidateTable,
        ours: Candidate,
        options: argparse.Namespace,
    ) -> None:
        self._splits = splits
        self._seed = options.seed
        self.table, self.ours = table, ours
        names = [model.name for model in table.models]
        self._models = {name: ModelRunner(engines, name) for name in names}
        self._engines = engines
        self._cut = best(table, chains(table, 2, CUT))
        pruning = [one.gaps[0].alpha for one in table.candidates if one.levels == ours.levels and one.gaps]
        self._alpha = ours.gaps[0].alpha or max(pruning, default=0.0) or ALPHA
        self._small, self._large = names[0], names[-1]
        self.note = (
            f"of all candidates {choose(table.candidates, _least(table), 0.0).serving.name}; ours: {ours.name} "
            f"(profile: {100 * ours.accuracy:.2f}%, at least {100 * ours.assured_accuracy:.2f}%, "
            f"{ours.latency_ms:.3f} ms)"
        )

    def compare(self, texts: int, output: Output) -> list[Row]:
        """Compare all systems on the test set; the rows of the table."""
        sample = self._splits.test.subset(texts)
        truth = sample.classes(self.table.labels)
        variants = self._variants(best(self.table, chains(self.table, 3)))
        candidates = [candidate for _, _, candidate in variants]
        measured = measurements.measure(self._models, candidates, sample.texts, truth, self._seed)
        systems = self._systems(measured, variants)
        rows = report.rows(systems)
        output.table(f"{self.table.task}: {len(truth)} test texts; {self.note}", rows)
        ours = next(system for system in systems if system.name == "ours").answers
        parts = [
            report.bound(measured, ours, self.ours),
            report.pruning(measured, ours, _changed(self.ours, alpha=self._alpha)),
            report.calibration_error(ours),
            *(report.levels(system) for system in systems if system.name in ("ours", THREE)),
            report.by_level(measured, ours, self.ours),
        ]
        output.say("\n".join(parts))
        return rows

    def heavier(self, layers: int, texts: int, output: Output) -> None:
        """Compare latencies alone: the same first level and decisions, with a large model of random weights."""
        task = build.heavy_checkpoint(layers, self.table.labels)
        (name,) = build.build_models(task, [layers])
        sample = self._splits.test.subset(texts)
        truth = sample.classes(self.table.labels)
        small = self.ours.levels[0]
        models = {small: self._models[small], name: ModelRunner(build.build_paths().engines, name)}
        candidate = replace(self.ours, levels=(small, name), gaps=self.ours.gaps[:1])
        measured = measurements.measure(models, [candidate], sample.texts, truth, self._seed)
        large = replace(self.table.model(self._large), name=name)
        table = replace(self.table, models=(*self.table.models, large))
        always = System("always large", measurements.run_single(measured, name))
        ours = System("ours", self._averaged(measured, table, candidate))
        title = f"{layers} layers of random weights behind the same decisions, {len(truth)} texts: latency alone"
        output.table(title, report.rows([always, ours]))
        output.say(report.bound(measured, ours.answers, candidate))

    def through_server(self, repositories: Sequence[Path], front: str, requests: int, output: Output) -> list[Row]:
        """Compare the front and the large model alone in one server; the rows of the table."""
        levels = self.ours.levels[1:]
        texts = [text[0].decode() for text in self._splits.test.subset(requests).texts]
        engines = {name: len(self._models[name].manifest.engines) for name in levels}
        rows = measure_served(engines, levels[-1], front, repositories, texts, self._seed)
        output.table(f"{self.table.task} through the server, {len(texts)} requests, one text each", rows)
        return rows

    def _variants(self, three: Candidate | None) -> list[tuple[str, CandidateTable, Candidate]]:
        """The cascade, the cascade without each of its parts, and its alternatives."""
        table, ours = self.table, self.ours
        calm = replace(table, models=tuple(replace(model, temperature=1.0) for model in table.models))
        variants: list[tuple[str, CandidateTable, Candidate]] = [("ours", table, ours)]
        if ours.gaps[0].alpha:
            variants.append(("ours without pruning", table, _changed(ours, alpha=0.0)))
        else:
            variants.append((f"ours with pruning, alpha {self._alpha:g}", table, _changed(ours, alpha=self._alpha)))
        variants += [
            ("ours without ensemble", table, _changed(ours, w=1.0)),
            ("ours without calibration", calm, ours),
            ("ours with cut for Eq. 4", table, _changed(ours, algorithm=CUT)),
        ]
        if self._cut:
            variants.append((f"cut, c {self._cut.gaps[0].c:g}", table, self._cut))
        if three:
            variants.append((THREE, table, three))
        return variants

    def _systems(
        self, measured: Measurements, variants: Sequence[tuple[str, CandidateTable, Candidate]]
    ) -> list[System]:
        rows = [
            self._single("always large", measured, self._large),
            self._single("always small", measured, self._small),
        ]
        rows += [self._single(f"always {name}", measured, name) for name in list(self._models)[1:-1]]
        others = [name for name in self._models if name != self._large]
        if len(others) > 1:
            weights = [self.table.model(name).accuracy for name in others]
            rows.append(System(f"voting of {' and '.join(others)}", measurements.run_voting(measured, others, weights)))
        rows += [System(name, self._averaged(measured, table, one)) for name, table, one in variants]
        return rows

    def _averaged(self, measured: Measurements, table: CandidateTable, candidate: Candidate, runs: int = 3) -> Answers:
        """The run of median mean time among several, each with its own random draws."""
        answers = [measurements.run_cascade(measured, table, candidate, self._seed + run) for run in range(runs)]
        return sorted(answers, key=lambda one: float(one.ms.mean()))[runs // 2]

    def _single(self, name: str, measured: Measurements, model: str) -> System:
        return System(name, measurements.run_single(measured, model))


def _changed(candidate: Candidate, **changes: Any) -> Candidate:
    gaps: tuple[Gap, ...] = tuple(replace(gap, **changes) for gap in candidate.gaps)
    return replace(candidate, gaps=gaps)
