"""A task of `bench.cascade`: every system on its test texts, and two systems through a server."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.cascade import measurements, report, zoo
from bench.cascade.measurements import Answers, Measurements
from bench.cascade.report import System
from bench.common.cells import Cells
from bench.common.output import BUILD, Output, Row
from bench.common.server import loaded_server
from bench.common.texts import TritonModel
from bench.common.texts import figures as texts_figures
from shapeshift.cascade.candidates import Candidate, CandidateTable
from shapeshift.cascade.profiling.observation import ModelRunner
from shapeshift.workloads.arrivals import poisson

FRONT = "classify_text"
LARGE, SMALL, OURS = "always large", "always small", "ours"
_WARM_UP, _SERVED = 50, 200


class TaskBench:
    """The two models of a task, and the candidate that serves: both of them, or one alone."""

    def __init__(self, task: str, seed: int) -> None:
        self._test, self._seed = zoo.texts_to_test(task), seed
        engines, serving = zoo.serving(task, seed)
        self._table, self._ours = serving.table, serving.candidate
        self._small, self._large = (model.name for model in self._table.models)
        self._models = {name: ModelRunner(engines, name) for name in (self._small, self._large)}

    def compare(self, texts: int, output: Output) -> list[Row]:
        """Compare all systems on so many texts, all with 0; the rows of the table."""
        sample, ours = self._test.subset(texts), self._ours
        truth = sample.classes(self._table.labels)
        variants = self._variants()
        chosen = [candidate for _, _, candidate in variants]
        measured = measurements.measure(self._models, chosen, sample.texts, truth, self._seed)
        large = System(LARGE, measurements.run_single(measured, self._large))
        small = System(SMALL, measurements.run_single(measured, self._small))
        systems = [System(name, self._averaged(measured, table, one)) for name, table, one in variants]
        rows = [system.row(large) for system in (large, small, *systems)]
        expected = f"{100 * ours.accuracy:.2f}%, at least {100 * ours.assured_accuracy:.2f}%, {ours.latency_ms:.3f} ms"
        output.table(f"{self._table.task}: {len(truth)} test texts; ours: {ours.name} (profile: {expected})", rows)
        output.say(report.difference(systems[0], large))
        if ours.gaps:
            answers = systems[0].answers
            output.say(report.pruning(measured, answers, ours))
            output.say(report.calibration_error(answers))
        return rows

    def through_server(self, output: Output) -> list[Row]:
        """Compare the front and the large model alone in one server, one text a request; the rows of the table.

        The open loop has half the rate of the large model alone.
        """
        texts = [text[0].decode() for text in self._test.subset(_SERVED).texts]
        cells = Cells(texts_figures, self._seed)
        engines = {self._large: len(self._models[self._large].manifest.engines), FRONT: 0}
        with loaded_server(engines, (BUILD / "repository",)) as server:
            named = ((LARGE, self._large), (OURS, FRONT))
            systems = [TritonModel(name, server.grpc_url, model) for name, model in named]
            for system in systems:
                system.closed(texts, 1, _WARM_UP)
            closed = {system.name: partial(system.closed, texts, 1, len(texts)) for system in systems}
            cells.measure("one at a time", closed, rounds=2)
            rate = 0.5e3 / cells.figure("one at a time", LARGE, "mean_ms")
            instants = poisson(rate, len(texts) / rate, np.random.default_rng(self._seed))
            cells.measure(f"open, {rate:.0f}/s", {one.name: partial(one.open, texts, instants) for one in systems})
        output.say(cells.tables(f"{self._table.task} through the server, {len(texts)} requests, "))
        ratios = {load: cells.over(load, OURS, LARGE, "mean_ms") for load in cells.loads}
        output.table(f"mean time of {OURS} over {LARGE}", [ratios])
        return cells.records()

    def _variants(self) -> list[tuple[str, CandidateTable, Candidate]]:
        """What serves, and of a cascade the same without each of its parts."""
        table, ours = self._table, self._ours
        if not ours.gaps:
            return [(OURS, table, ours)]
        calm = replace(table, models=tuple(replace(model, temperature=1.0) for model in table.models))
        pruning = ours.gaps[0].alpha > 0
        return [
            (OURS, table, ours),
            *([("ours without pruning", table, changed(ours, alpha=0.0))] if pruning else []),
            ("ours without ensemble", table, changed(ours, w=1.0)),
            ("ours without calibration", calm, ours),
            ("ours with cut for Eq. 4", table, changed(ours, algorithm="cut")),
        ]

    def _averaged(self, measured: Measurements, table: CandidateTable, candidate: Candidate, runs: int = 3) -> Answers:
        """The run of median mean time among several, each with its own random draws."""
        answers = [measurements.run_cascade(measured, table, candidate, self._seed + run) for run in range(runs)]
        return sorted(answers, key=lambda one: float(one.ms.mean()))[runs // 2]


def changed(candidate: Candidate, **changes: Any) -> Candidate:
    """The candidate with other values in each of its gaps."""
    return replace(candidate, gaps=tuple(replace(gap, **changes) for gap in candidate.gaps))
