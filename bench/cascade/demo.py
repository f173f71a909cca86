"""The demo's cascade on CLINC150: every system on the test set, and two systems through a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cascade import build, measurements, report
from bench.cascade.measurements import Answers, Measurements
from bench.cascade.report import System
from bench.common.output import BUILD, Output, Row
from bench.common.public_data import data_file
from bench.common.server import loaded_server
from bench.common.systems import Outcome, TritonModel
from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import Candidate, CandidateTable
from shapeshift.cascade.profiling.observation import ModelRunner
from shapeshift.cascade.profiling.samples import Sample
from shapeshift.workloads.arrivals import poisson

TASK, FRONT = "clinc150", "classify_text"
CANDIDATES = Path("checkpoints/clinc150-minilm/candidates")
DATA = "clinc150/data_full.json"
# The alpha that shows the effect of pruning where the candidate does not prune.
ALPHA = 0.7
_WARM_UP = 50


def labelled_texts() -> Sample:
    """The labelled texts of CLINC150's test part. Raises NotFoundError where they are missing."""
    part = json.loads(data_file(DATA).read_text(encoding="utf-8"))["test"]
    return Sample([[text.encode()] for text, _ in part], [label for _, label in part])


class DemoBench:
    """The demo's two models, and the candidate that serves."""

    def __init__(self, seed: int) -> None:
        serving = candidates.serving(CANDIDATES, TASK)
        self._table, self._ours = serving.table, serving.candidate
        self._test, self._seed = labelled_texts(), seed
        self._small, self._large = self._ours.levels
        self._models = {name: ModelRunner(BUILD / "engines", name) for name in self._ours.levels}
        self._alpha = self._ours.gaps[0].alpha or ALPHA

    def compare(self, texts: int, output: Output) -> list[Row]:
        """Compare all systems on so many texts, all with 0; the rows of the table."""
        sample, ours = self._test.subset(texts), self._ours
        truth = sample.classes(self._table.labels)
        variants = self._variants()
        chosen = [candidate for _, _, candidate in variants]
        measured = measurements.measure(self._models, chosen, sample.texts, truth, self._seed)
        systems = [
            System("always large", measurements.run_single(measured, self._large)),
            System("always small", measurements.run_single(measured, self._small)),
            *(System(name, self._averaged(measured, table, one)) for name, table, one in variants),
        ]
        rows = report.rows(systems)
        expected = f"{100 * ours.accuracy:.2f}%, at least {100 * ours.assured_accuracy:.2f}%, {ours.latency_ms:.3f} ms"
        output.table(f"{TASK}: {len(truth)} test texts; ours: {ours.name} (profile: {expected})", rows)
        answers = systems[2].answers
        output.say(report.bound(measured, answers, ours))
        output.say(report.pruning(measured, answers, changed(ours, alpha=self._alpha)))
        output.say(report.calibration_error(answers))
        return rows

    def heavier(self, layers: int, texts: int, output: Output) -> None:
        """Compare latencies alone: the same first level and decisions, with a large model of random weights."""
        engines, name = build.heavy_model(layers, self._table.labels)
        sample = self._test.subset(texts)
        truth = sample.classes(self._table.labels)
        models = {self._small: self._models[self._small], name: ModelRunner(engines, name)}
        candidate = replace(self._ours, levels=(self._small, name))
        measured = measurements.measure(models, [candidate], sample.texts, truth, self._seed)
        large = replace(self._table.model(self._large), name=name)
        table = replace(self._table, models=(*self._table.models, large))
        always = System("always large", measurements.run_single(measured, name))
        ours = System("ours", self._averaged(measured, table, candidate))
        title = f"{layers} layers of random weights behind the same decisions, {len(truth)} texts: latency alone"
        output.table(title, report.rows([always, ours]))
        output.say(report.bound(measured, ours.answers, candidate))

    def through_server(self, requests: int, output: Output) -> list[Row]:
        """Compare the front and the large model alone in one server, one text a request; the rows of the table.

        The open loop has half the rate of the large model alone.
        """
        texts = [text[0].decode() for text in self._test.subset(requests).texts]
        engines = {self._large: len(self._models[self._large].manifest.engines), FRONT: 0}
        with loaded_server(engines, (BUILD / "repository",)) as server:
            named = (("always large", self._large), ("ours", FRONT))
            systems = [TritonModel(name, server.grpc_url, model) for name, model in named]
            for system in systems:
                system.closed(texts, 1, _WARM_UP)
            # In turn, so that other load on the machine affects both.
            closed = [system.closed(texts, 1, len(texts)) for _ in range(2) for system in systems]
            rate = 0.5e3 / float(np.mean([closed[0].mean_ms, closed[2].mean_ms]))
            instants = poisson(rate, len(texts) / rate, np.random.default_rng(self._seed))
            sent = [texts[number % len(texts)] for number in range(len(instants))]
            opened = [system.open(sent, instants) for system in systems]
        rows = served_rows("closed loop", closed[0::2], closed[1::2])
        rows += served_rows(f"open, {rate:.0f}/s", opened[:1], opened[1:])
        output.table(f"{TASK} through the server, {len(texts)} requests, one text each", rows)
        return rows

    def _variants(self) -> list[tuple[str, CandidateTable, Candidate]]:
        """The cascade, and the cascade without each of its parts."""
        table, ours = self._table, self._ours
        calm = replace(table, models=tuple(replace(model, temperature=1.0) for model in table.models))
        pruned = ours.gaps[0].alpha
        name, alpha = ("ours without pruning", 0.0) if pruned else (f"ours with pruning, alpha {ALPHA:g}", ALPHA)
        return [
            ("ours", table, ours),
            (name, table, changed(ours, alpha=alpha)),
            ("ours without ensemble", table, changed(ours, w=1.0)),
            ("ours without calibration", calm, ours),
            ("ours with cut for Eq. 4", table, changed(ours, algorithm="cut")),
        ]

    def _averaged(self, measured: Measurements, table: CandidateTable, candidate: Candidate, runs: int = 3) -> Answers:
        """The run of median mean time among several, each with its own random draws."""
        answers = [measurements.run_cascade(measured, table, candidate, self._seed + run) for run in range(runs)]
        return sorted(answers, key=lambda one: float(one.ms.mean()))[runs // 2]


def served_rows(load: str, large: Sequence[Outcome], ours: Sequence[Outcome]) -> list[Row]:
    """A row for each system under a load."""
    rows: list[Row] = []
    base_ms = float(np.concatenate([one.latency_ms for one in large]).mean())
    for name, outcomes in (("always large", large), ("ours", ours)):
        times = np.concatenate([one.latency_ms for one in outcomes])
        p25, p50, p75, p99 = np.percentile(times, [25, 50, 75, 99]).tolist()
        row = {"system": name, "load": load, "mean_ms": float(times.mean()), "p25": p25, "p50": p50, "p75": p75}
        failed = sum(one.failed for one in outcomes)
        rows.append({**row, "p99": p99, "failed": failed, "of the first": float(times.mean()) / base_ms})
    return rows


def changed(candidate: Candidate, **changes: Any) -> Candidate:
    """The candidate with other values in each of its gaps."""
    return replace(candidate, gaps=tuple(replace(gap, **changes) for gap in candidate.gaps))
