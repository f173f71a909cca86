"""The systems and tables that the cascade's benchmark computes from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bench.cascade import measurements, report, zoo
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


def test_pruned_texts_are_measured_apart(measured: Measurements) -> None:
    ours = measurements.run_cascade(measured, TABLE, candidate(alpha=0.5), seed=0)
    onward = ours.level == 2
    # Three words for the first level, and two for the second.
    np.testing.assert_allclose(ours.ms - ours.control_ms, np.where(onward, 5, 3))
    line = report.pruning(measured, ours, candidate(alpha=0.5))
    assert "33.3% of words pruned" in line and "3.000 > 2.000 ms" in line


def test_tables_say_what_was_measured(measured: Measurements) -> None:
    ours = measurements.run_cascade(measured, TABLE, candidate(), seed=0)
    large = System("always large", measurements.run_single(measured, "large"))
    always, cascade = large.row(large), System("ours", ours).row(large)
    assert always["accuracy"] == 1.0 and always["of the first"] == 1.0
    assert cascade["system"] == "ours" and cascade["early"] == 0.75
    small = System("always small", measurements.run_single(measured, "small"))
    times = ours.ms.mean() / small.answers.ms.mean()
    said = report.difference(System("ours", ours), small)
    assert f"+25.00 points (+13.74 to +36.26) at {times:.2f} of its mean time" in said
    assert times > 1.2


def test_a_plain_clone_has_samples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SHAPESHIFT_DATA", raising=False)
    assert public_data.described() == "samples"
    sample = zoo.texts_to_test("clinc150")
    assert (len(set(sample.labels)), len(sample.labels)) == (150, 4500)
    assert len(trace.read(public_data.data_file("azure_llm_2023/conv.csv"))) == 4000
    assert "the sample of " in capsys.readouterr().err
    assert sum(file.stat().st_size for file in public_data.SAMPLES.rglob("*") if file.is_file()) < 1_000_000


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAPESHIFT_DATA", str(tmp_path))
    with pytest.raises(NotFoundError, match="SHAPESHIFT_DATA"):
        zoo.texts_to_test("clinc150")
    monkeypatch.chdir(tmp_path)
    for task in zoo.LAYERS:
        with pytest.raises(NotFoundError, match="text-classifiers/texts.py"):
            zoo.texts_to_test(task)
