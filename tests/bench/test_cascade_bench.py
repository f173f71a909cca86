"""The systems and tables that the cascade's benchmark computes from measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bench.cascade import datasets, measurements, report, task_bench
from bench.cascade.measurements import Measurements
from bench.cascade.report import System
from bench.common import public_data
from shapeshift.cascade.candidates import Candidate, CandidateTable, Gap, LevelModel
from shapeshift.cascade.policy.routing import LevelOutput
from shapeshift.cascade.profiling.observation import ModelRunner
from shapeshift.errors import NotFoundError
from shapeshift.workloads import trace

TEXTS = [[f"{'sure' if number % 4 else 'unsure'} word {number}".encode()] for number in range(40)]
TRUTH = np.arange(40) % 2
OFFSETS = np.array([[0, 4], [5, 9], [10, 12]], np.int32)


class Model:
    """Right where it is sure, or always; its time is the number of words it reads."""

    def __init__(self, always: bool) -> None:
        self._always = always

    def run_one(self, text: Sequence[bytes]) -> tuple[LevelOutput, float]:
        number = int(text[0].split()[-1]) if text[0].split()[-1].isdigit() else 0
        sure = b"unsure" not in text[0]
        answer = TRUTH[number] if self._always or sure else 1 - TRUTH[number]
        logits = np.eye(2)[answer] * (8.0 if self._always or sure else 0.2)
        return LevelOutput(logits, np.array([3.0, 0.1, 3.0]), OFFSETS + (0 if sure else 2)), float(len(text[0].split()))


def candidate(**changes: Any) -> Candidate:
    gap = {"c": 0.9, "k": 10.0, "algorithm": "cut", "alpha": 0.0, "w": 0.8, **changes}
    return Candidate("ours", ("small", "large"), (Gap(**gap),), 1.0, 4.0, 6.0, 6.0, (3.0, 3.0), (0.75, 0.25), 0.9, 0.0)


TABLE = CandidateTable(
    "task",
    "classification",
    ("a", "b"),
    False,
    0.0,
    {},
    tuple(LevelModel(name, "", 0.9, 3.0, 1.0, 0.0, ("LOGITS",)) for name in ("small", "large")),
    (candidate(),),
)


@pytest.fixture(scope="module")
def measured() -> Measurements:
    models = {"small": cast("ModelRunner", Model(False)), "large": cast("ModelRunner", Model(True))}
    return measurements.measure(models, [candidate(), candidate(alpha=0.5)], TEXTS, TRUTH, seed=0)


def test_systems_are_computed_from_the_same_measurements(measured: Measurements) -> None:
    small, large = (measurements.run_single(measured, name) for name in ("small", "large"))
    assert (small.right.mean(), large.right.mean()) == (0.75, 1.0)
    ours = measurements.run_cascade(measured, TABLE, candidate(), seed=0)
    np.testing.assert_array_equal(ours.level, 1 + (small.right == 0))
    assert ours.right.all() and (ours.control_ms > 0).all()
    # Three words for each level that was asked.
    np.testing.assert_allclose(ours.ms - ours.control_ms, 3 * ours.level)
    both = measurements.run_voting(measured, ["small", "large"], [0.2, 0.8])
    assert both.right.all() and (both.ms == 3).all()


def test_pruned_texts_are_measured_apart(measured: Measurements) -> None:
    ours = measurements.run_cascade(measured, TABLE, candidate(alpha=0.5), seed=0)
    onward = ours.level == 2
    assert (ours.pruned[onward] == 1).all() and not ours.pruned[~onward].any()
    np.testing.assert_allclose(ours.last_ms[onward], 2)
    line = report.pruning(measured, ours, candidate(alpha=0.5))
    assert "33.3% of words pruned" in line and "3.000 > 2.000 ms" in line


def test_tables_say_what_was_measured(measured: Measurements) -> None:
    ours = measurements.run_cascade(measured, TABLE, candidate(), seed=0)
    always, cascade = report.rows(
        [System("always large", measurements.run_single(measured, "large")), System("ours", ours)]
    )
    assert always["accuracy"] == 1.0 and always["of the first"] == 1.0
    assert cascade["system"] == "ours" and cascade["early"] == 0.75
    early, onward = report.by_level(measured, ours, candidate()).splitlines()[-2:]
    assert early.split()[2:] == ["0.75", "1", "1", "1"] and onward.split()[2:] == ["0.25", "1", "0", "1"]
    bound = report.bound(measured, ours, candidate())
    assert "p 0.250" in bound and "ratio 1.00" in bound
    assert "75.0%, 25.0%" in report.levels(System("ours", ours))


def test_the_best_chain_is_the_fastest_that_loses_little() -> None:
    one_level: dict[str, Any] = {"levels": ("large",), "gaps": (), "shares": (1.0,), "model_latencies": (3.0,)}
    alone = dataclasses.replace(candidate(), name="large", accuracy_bound=0.88, **one_level)
    candidates = [
        dataclasses.replace(candidate(algorithm=algorithm), name=name, accuracy_bound=bound, latency_ms=ms, p75_ms=4.0)
        for name, algorithm, bound, ms in (
            ("fast", "sigmoid", 0.87, 3.5),
            ("good", "sigmoid", 0.876, 4.0),
            ("better", "sigmoid", 0.88, 4.5),
            ("cut", "cut", 0.88, 3.0),
        )
    ]
    table = dataclasses.replace(TABLE, candidates=(alone, *candidates))
    assert task_bench.best_chain(table).name == "good"
    assert task_bench.best(table, task_bench.chains(table, 2, "cut")) == candidates[3]
    assert task_bench.best(table, candidates[:1]) == candidates[0]
    assert task_bench.best(table, task_bench.chains(table, 3)) is None
    with pytest.raises(NotFoundError, match="no cascade of task"):
        task_bench.best_chain(dataclasses.replace(table, candidates=(alone, candidates[3])))


def test_batches_hold_every_row_once() -> None:
    torch = pytest.importorskip("torch")
    from bench.cascade.train import BATCH, batches

    lengths = torch.randint(1, 100, (1000,))
    drawn = batches(lengths)
    assert sorted(row for batch in drawn for row in batch.tolist()) == list(range(1000))
    assert max(map(len, drawn)) == BATCH
    # In one pool, the batches' lengths do not overlap.
    spreads = sorted((int(lengths[batch].min()), int(lengths[batch].max())) for batch in drawn)
    assert all(before[1] <= after[0] for before, after in zip(spreads, spreads[1:], strict=False))


def test_a_plain_clone_has_samples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SHAPESHIFT_DATA", raising=False)
    public_data._say_sample.cache_clear()
    assert (datasets.available(), public_data.described()) == (["clinc150"], "samples")
    splits = datasets.read("clinc150")
    assert len(splits.labels) == 150
    assert (len(splits.train.labels), len(splits.val.labels), len(splits.test.labels)) == (6000, 1500, 4500)
    assert len(trace.read(public_data.data_file("azure_llm_2023/conv.csv"))) == 4000
    assert "the sample of clinc150/data_full.json" in capsys.readouterr().err
    assert sum(file.stat().st_size for file in public_data.SAMPLES.rglob("*") if file.is_file()) < 1_000_000


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPESHIFT_DATA", str(tmp_path))
    for task in datasets.TASKS:
        with pytest.raises(NotFoundError, match="SHAPESHIFT_DATA"):
            datasets.read(task)
