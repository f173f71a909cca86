"""One task of `bench.cascade`: its models profiled, every system on the test set, and the same through a server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import cascade_build, cascade_data, cascade_pieces, cascade_report
from bench.cascade_pieces import Answers, Pieces
from bench.cascade_report import Row
from bench.loads import TritonModel
from bench.systems import triton
from shapeshift.cascade import register
from shapeshift.cascade.choice import choose
from shapeshift.cascade.observe import ProfiledModel
from shapeshift.cascade.register import Profiling
from shapeshift.cascade.table import Candidate, Gap, Table
from shapeshift.cli.progress import Progress
from shapeshift.engines.hardware import cores
from shapeshift.errors import NotFoundError
from shapeshift.workloads.arrivals import poisson

POINT = 0.01
BUILD = Path("build")


def profile(
    task: str, splits: cascade_data.Splits, engines: Path, names: Sequence[str], texts: int, seed: int
) -> Table:
    """The candidate table of models on so many texts of the validation part."""
    progress = Progress(task)
    made = register.profile(task, splits.val.some(texts), engines, names, Profiling(seed=seed), progress)
    progress.done()
    return made.table


def best_chain(table: Table) -> Candidate:
    """The fastest cascade that ends in the last model and is at most a point less accurate than that alone.

    Raises NotFoundError where no other model is both faster and less accurate.
    """
    large = table.models[-1]
    chains = tuple(one for one in table.candidates if len(one.levels) > 1 and one.levels[-1] == large.name)
    if not chains:
        raise NotFoundError(
            f"no cascade of task {table.task}: no model is both faster and less accurate than {large.name}"
        )
    return choose(replace(table, candidates=chains), large.accuracy - POINT, 0.0).serving


class TaskBench:
    """One task: its profiled models, the smallest first, and the candidate that serves."""

    def __init__(
        self, splits: cascade_data.Splits, engines: Path, table: Table, ours: Candidate, options: argparse.Namespace
    ) -> None:
        self._splits = splits
        self._seed = options.seed
        self.table, self.ours = table, ours
        names = [model.name for model in table.models]
        self._models = {name: ProfiledModel(engines, name) for name in names}
        self._small, self._large = names[0], names[-1]
        least = table.model(self._large).accuracy - POINT
        self.note = (
            f"of all candidates {choose(table, least, 0.0).serving.name}; ours: {ours.name} "
            f"(profile: {100 * ours.accuracy:.2f}%, {ours.latency_ms:.3f} ms)"
        )
        self.rows: list[Row] = []

    def compare(self, texts: int) -> str:
        """Every system on the test set."""
        sample = self._splits.test.some(texts)
        truth = sample.numbers(self.table.labels)
        small = self.ours.levels[0]
        three = [one for one in self.table.candidates if len(one.levels) == 3 and one.levels[0] == small]
        best_three = max(
            three, key=lambda one: (one.accuracy >= self.ours.accuracy - POINT, -one.latency_ms), default=None
        )
        alphas = sorted({0.0, *(gap.alpha for one in (self.ours, best_three) if one for gap in one.gaps)})
        larger = [name for name in self._models if name != small]
        pieces = cascade_pieces.measure(self._models, small, larger, alphas, sample.texts, truth, self._seed)
        self.rows = rows = self._systems(pieces, best_three)
        ours = next(row for row in rows if row.name == "ours").answers
        alpha, large = self.ours.gaps[0].alpha, self.ours.levels[-1]
        parts = [
            cascade_report.table(f"\n{self.table.task}: {len(truth)} test texts; {self.note}", rows),
            *cascade_report.bound(pieces, ours, small, large, alpha),
            *cascade_report.by_level(pieces, ours, small, large),
            *cascade_report.pruning(pieces, ours, large, alpha),
            *cascade_report.calibration(ours),
        ]
        text = "\n".join(parts) + "\n"
        print(text, flush=True)
        return text

    def heavier(self, layers: int, texts: int) -> str:
        """Latency alone: the same first level and decisions, before a model of random weights."""
        task = cascade_build.heavy_checkpoint(layers, self.table.labels)
        (name,) = cascade_build.build_models(task, [layers], len(self.table.labels))
        sample = self._splits.test.some(texts)
        truth = sample.numbers(self.table.labels)
        small, alpha = self.ours.levels[0], self.ours.gaps[0].alpha
        models = {small: self._models[small], name: ProfiledModel(cascade_build.places().engines, name)}
        pieces = cascade_pieces.measure(models, small, [name], [0.0, alpha], sample.texts, truth, self._seed)
        candidate = replace(self.ours, levels=(small, name), gaps=self.ours.gaps[:1])
        large = replace(self.table.model(self._large), name=name)
        table = replace(self.table, models=(*self.table.models, large))
        always = Row("always large", cascade_pieces.single(pieces, name), 0.0)
        ours = Row("ours", self._averaged(pieces, table, candidate), 0.0)
        lines = [f"\n{layers} layers of random weights behind the same decisions, {len(truth)} texts: latency alone"]
        for row in (always, ours):
            p50, p99 = np.percentile(row.answers.ms, [50, 99])
            lines.append(f"  {row.name:16} mean {row.mean_ms:8.3f}  p50 {p50:8.3f}  p99 {p99:8.3f} ms")
        lines.append(
            f"  mean {100 * (ours.mean_ms / always.mean_ms - 1):+.1f}%, p99 "
            f"{np.percentile(ours.answers.ms, 99) / np.percentile(always.answers.ms, 99):.2f} times"
        )
        lines += cascade_report.bound(pieces, ours.answers, small, name, alpha)
        text = "\n".join(lines) + "\n"
        print(text, flush=True)
        return text

    def through_server(self, repositories: Sequence[Path], front: str, requests: int) -> str:
        """The front and the large model alone in one server, in turn, closed loop and open loop."""
        levels = self.ours.levels[1:]
        texts = [text[0].decode() for text in self._splits.test.some(requests).texts]
        lines = [f"\n{self.table.task} through the server, {requests} requests, one text each"]
        lines.append(f"  {'':28}{'mean ms':>9}{'p50':>8}{'p99':>8}{'failed':>7}")
        engines = {name: len(self._models[name].made.engines) for name in levels}
        with triton(engines | {front: 0}, repositories, BUILD) as server:
            systems = [
                TritonModel("always large", server.grpc_url, levels[-1]),
                TritonModel("ours", server.grpc_url, front),
            ]
            for system in systems:
                system.closed(texts, 1, 50)
            closed = [system.closed(texts, 1, requests) for _ in range(2) for system in systems]
            rate = 0.5e3 / float(np.mean([closed[0].latency_ms.mean(), closed[2].latency_ms.mean()]))
            instants = poisson(rate, requests / rate, np.random.default_rng(self._seed))
            asked = [texts[number % len(texts)] for number in range(len(instants))]
            opened = [system.open(asked, instants) for system in systems]
        loads = [
            ("closed loop", [closed[0], closed[2]], [closed[1], closed[3]]),
            (f"open, {rate:.0f}/s", opened[:1], opened[1:]),
        ]
        for load, *outcomes in loads:
            means = []
            for system, own in zip(systems, outcomes, strict=True):
                times = np.concatenate([one.latency_ms for one in own])
                means.append(float(times.mean()))
                p50, p99 = np.percentile(times, [50, 99])
                name = f"{load}: {system.name}"
                failed = sum(one.failed for one in own)
                lines.append(f"  {name:28}{times.mean():9.2f}{p50:8.2f}{p99:8.2f}{failed:7}")
            lines.append(f"  {'':28}{100 * (means[1] / means[0] - 1):+8.1f}%")
        text = "\n".join(lines) + "\n"
        print(text, flush=True)
        return text

    def _systems(self, pieces: Pieces, three: Candidate | None) -> list[Row]:
        table, ours = self.table, self.ours
        calm = replace(table, models=tuple(replace(model, temperature=1.0) for model in table.models))
        variants: list[tuple[str, Table, Candidate]] = [
            ("ours", table, ours),
            ("ours without pruning", table, _changed(ours, alpha=0.0)),
            ("ours without ensemble", table, _changed(ours, w=1.0)),
            ("ours without calibration", calm, ours),
            ("ours with cut for Eq. 4", table, _changed(ours, algorithm="cut")),
        ]
        if three:
            variants.append(("three levels", table, three))
        rows = [self._single("always large", pieces, self._large), self._single("always small", pieces, self._small)]
        rows += [self._single(f"always {name}", pieces, name) for name in list(self._models)[1:-1]]
        others = [name for name in self._models if name != self._large]
        if len(others) > 1:
            weights = [table.model(name).accuracy for name in others]
            cost = sum(_cost(pieces, name) for name in others)
            rows.append(Row(f"voting of {' and '.join(others)}", cascade_pieces.voting(pieces, others, weights), cost))
        for name, own, candidate in variants:
            if all((level, 0.0) in pieces.found for level in candidate.levels):
                answers = self._averaged(pieces, own, candidate)
                rows.append(Row(name, answers, float((answers.ms - answers.control_ms).mean()) / cores()))
        return rows

    def _averaged(self, pieces: Pieces, table: Table, candidate: Candidate, runs: int = 3) -> Answers:
        """The run of middle mean time among several, each with its own draws."""
        made = [cascade_pieces.cascade(pieces, table, candidate, self._seed + run) for run in range(runs)]
        return sorted(made, key=lambda one: float(one.ms.mean()))[runs // 2]

    def _single(self, name: str, pieces: Pieces, model: str) -> Row:
        return Row(name, cascade_pieces.single(pieces, model), _cost(pieces, model))


def _cost(pieces: Pieces, model: str) -> float:
    """Mean time over how many such models the machine runs at once: one a core, as each takes one thread."""
    return float(np.mean([took for _, took in pieces.found[model, 0.0]])) / cores()


def _changed(candidate: Candidate, **changes: Any) -> Candidate:
    gaps: tuple[Gap, ...] = tuple(replace(gap, **changes) for gap in candidate.gaps)
    return replace(candidate, gaps=gaps)
