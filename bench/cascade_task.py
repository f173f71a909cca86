"""One task of `bench.cascade`: its models profiled, every system on the test set, and the same through a server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import cascade_build, cascade_data, cascade_packing, cascade_pieces, cascade_report, cascade_served
from bench.cascade_pieces import Answers, Pieces
from bench.cascade_report import Row
from shapeshift.cascade import register, route
from shapeshift.cascade.choice import choose
from shapeshift.cascade.observe import ProfiledModel
from shapeshift.cascade.register import Profiling
from shapeshift.cascade.table import Candidate, Gap, Table
from shapeshift.errors import NotFoundError
from shapeshift.progress import Progress

# Of accuracy, on the profile's sample: half of the point that may be lost on other texts.
LOSS = 0.005
CUT, THREE = "cut", "three levels"
# What is pruned to show what pruning does where no candidate prunes.
ALPHA = 0.7
PACKED = 100
BUILD = Path("build")


def profile(
    task: str, splits: cascade_data.Splits, engines: Path, names: Sequence[str], texts: int, seed: int
) -> Table:
    """The candidate table of models on so many texts of the validation part, by Eq. 4 and by the cut-off."""
    progress = Progress(task)
    made = register.profile(
        task, splits.val.some(texts), engines, names, Profiling(algorithms=tuple(route.ALGORITHMS), seed=seed), progress
    )
    progress.done()
    return made.table


def chains(table: Table, levels: int, algorithm: str = "sigmoid") -> tuple[Candidate, ...]:
    """The cascades of so many levels that end in the last model."""
    found = [one for one in table.candidates if len(one.levels) == levels and one.levels[-1] == table.models[-1].name]
    return tuple(one for one in found if all(gap.algorithm == algorithm for gap in one.gaps))


def best(table: Table, found: Sequence[Candidate]) -> Candidate | None:
    """The fastest of `found` that is at most half a point less accurate than the last model, else the best."""
    if not found:
        return None
    return choose(replace(table, candidates=tuple(found)), table.models[-1].accuracy - LOSS, 0.0).serving


def best_chain(table: Table) -> Candidate:
    """The best cascade of two levels; NotFoundError where no model is both faster and less accurate than the last."""
    found = best(table, chains(table, 2))
    if found is None:
        large = table.models[-1].name
        raise NotFoundError(f"no cascade of task {table.task}: no model is both faster and less accurate than {large}")
    return found


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
        self._engines = engines
        self._cut = best(table, chains(table, 2, CUT))
        pruning = [one.gaps[0].alpha for one in table.candidates if one.levels == ours.levels and one.gaps]
        self._alpha = ours.gaps[0].alpha or max(pruning, default=0.0) or ALPHA
        self._small, self._large = names[0], names[-1]
        least = table.model(self._large).accuracy - LOSS
        self.note = (
            f"of all candidates {choose(table, least, 0.0).serving.name}; ours: {ours.name} "
            f"(profile: {100 * ours.accuracy:.2f}%, {ours.latency_ms:.3f} ms)"
        )
        self.rows: list[Row] = []

    def compare(self, texts: int) -> str:
        """Every system on the test set."""
        sample = self._splits.test.some(texts)
        truth = sample.numbers(self.table.labels)
        three = best(self.table, chains(self.table, 3))
        variants = self._variants(three)
        asked = [made for _, _, made in variants]
        pieces = cascade_pieces.measure(self._models, asked, sample.texts, truth, self._seed)
        pieces.packing = cascade_packing.factors(self._engines, list(self._models), sample.texts[:PACKED])
        self.rows = rows = self._systems(pieces, variants)
        ours = next(row for row in rows if row.name == "ours").answers
        parts = [
            cascade_report.table(f"\n{self.table.task}: {len(truth)} test texts; {self.note}", rows),
            *cascade_report.bound(pieces, ours, self.ours),
            *cascade_report.by_level(pieces, ours, self.ours),
            *cascade_report.pruning(pieces, ours, _changed(self.ours, alpha=self._alpha)),
            *cascade_report.calibration(ours),
            *cascade_report.levels([row for row in rows if row.name in ("ours", THREE)]),
            *cascade_report.packing(pieces.packing),
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
        small = self.ours.levels[0]
        models = {small: self._models[small], name: ProfiledModel(cascade_build.places().engines, name)}
        candidate = replace(self.ours, levels=(small, name), gaps=self.ours.gaps[:1])
        pieces = cascade_pieces.measure(models, [candidate], sample.texts, truth, self._seed)
        large = replace(self.table.model(self._large), name=name)
        table = replace(self.table, models=(*self.table.models, large))
        always = Row("always large", cascade_pieces.single(pieces, name))
        ours = Row("ours", self._averaged(pieces, table, candidate))
        lines = [f"\n{layers} layers of random weights behind the same decisions, {len(truth)} texts: latency alone"]
        for row in (always, ours):
            p50, p99 = np.percentile(row.answers.ms, [50, 99])
            lines.append(f"  {row.name:16} mean {row.mean_ms:8.3f}  p50 {p50:8.3f}  p99 {p99:8.3f} ms")
        lines.append(
            f"  mean {100 * (ours.mean_ms / always.mean_ms - 1):+.1f}%, p99 "
            f"{np.percentile(ours.answers.ms, 99) / np.percentile(always.answers.ms, 99):.2f} times"
        )
        lines += cascade_report.bound(pieces, ours.answers, candidate)
        text = "\n".join(lines) + "\n"
        print(text, flush=True)
        return text

    def through_server(self, repositories: Sequence[Path], front: str, requests: int) -> str:
        """The front and the large model alone in one server."""
        levels = self.ours.levels[1:]
        texts = [text[0].decode() for text in self._splits.test.some(requests).texts]
        engines = {name: len(self._models[name].made.engines) for name in levels}
        made = cascade_served.measure(
            self.table.task, engines, levels[-1], front, repositories, BUILD, texts, self._seed
        )
        print(made, flush=True)
        return made

    def _variants(self, three: Candidate | None) -> list[tuple[str, Table, Candidate]]:
        """The cascade, each of its parts off, and its alternatives."""
        table, ours = self.table, self.ours
        calm = replace(table, models=tuple(replace(model, temperature=1.0) for model in table.models))
        found: list[tuple[str, Table, Candidate]] = [("ours", table, ours)]
        if ours.gaps[0].alpha:
            found.append(("ours without pruning", table, _changed(ours, alpha=0.0)))
        else:
            found.append((f"ours with pruning, alpha {self._alpha:g}", table, _changed(ours, alpha=self._alpha)))
        found += [
            ("ours without ensemble", table, _changed(ours, w=1.0)),
            ("ours without calibration", calm, ours),
            ("ours with cut for Eq. 4", table, _changed(ours, algorithm=CUT)),
        ]
        if self._cut:
            found.append((f"cut, c {self._cut.gaps[0].c:g}", table, self._cut))
        if three:
            found.append((THREE, table, three))
        return found

    def _systems(self, pieces: Pieces, variants: Sequence[tuple[str, Table, Candidate]]) -> list[Row]:
        rows = [self._single("always large", pieces, self._large), self._single("always small", pieces, self._small)]
        rows += [self._single(f"always {name}", pieces, name) for name in list(self._models)[1:-1]]
        others = [name for name in self._models if name != self._large]
        if len(others) > 1:
            weights = [self.table.model(name).accuracy for name in others]
            rows.append(Row(f"voting of {' and '.join(others)}", cascade_pieces.voting(pieces, others, weights)))
        rows += [Row(name, self._averaged(pieces, own, made)) for name, own, made in variants]
        return rows

    def _averaged(self, pieces: Pieces, table: Table, candidate: Candidate, runs: int = 3) -> Answers:
        """The run of middle mean time among several, each with its own draws."""
        made = [cascade_pieces.cascade(pieces, table, candidate, self._seed + run) for run in range(runs)]
        return sorted(made, key=lambda one: float(one.ms.mean()))[runs // 2]

    def _single(self, name: str, pieces: Pieces, model: str) -> Row:
        return Row(name, cascade_pieces.single(pieces, model))


def _changed(candidate: Candidate, **changes: Any) -> Candidate:
    gaps: tuple[Gap, ...] = tuple(replace(gap, **changes) for gap in candidate.gaps)
    return replace(candidate, gaps=gaps)
