"""The simulated cascade: its levels, its routing, and the answers that texts keep where a later level is dead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import Candidate, Gap
from shapeshift.errors import InvalidInputError
from shapeshift.simulate.cascade import CascadeLaw, SimulationResult, drawn_confidence, run
from shapeshift.workloads.trace import Trace

LAW = CascadeLaw(candidates="", control_ms=0.0, hop_ms=1.0, engine_threads=1, instances=1)
GAP = Gap(c=0.8, k=10.0, algorithm="cut", alpha=0.0, w=0.5)
TWO = Candidate("two", ("small", "large"), (GAP,), 0.9, 0, 0, 0, (2.0, 9.0), (0.5, 0.5), 0.8, 0.0)
FOLDER = Path(__file__).resolve().parents[2] / "checkpoints/text-classifiers/candidates"


def serve(confidence: list[float], at_s: list[float], candidate: Candidate = TWO, **changed: float) -> SimulationResult:
    return run(replace(LAW, **changed), candidate, np.array([confidence]), texts(at_s))  # type: ignore[arg-type]


def texts(at_s: Sequence[float], length: int = 1) -> Trace:
    return Trace(np.array(at_s, float), np.full(len(at_s), length))


def test_an_unsure_text_pays_for_both_levels() -> None:
    result = serve([0.9, 0.7, 0.8], [0.0, 1.0, 2.0])
    assert result.level.tolist() == [1, 2, 2]
    assert result.latency_ms == pytest.approx([2.0, 12.0, 12.0])


def test_texts_wait_for_each_level_apart() -> None:
    result = serve([0.0, 0.0, 0.9], [0.0, 0.0, 0.0])
    assert result.latency_ms == pytest.approx([12.0, 21.0, 6.0])
    assert serve([0.0, 0.0, 0.9], [0.0] * 3, instances=2, engine_threads=3).latency_ms == pytest.approx([12, 12, 2])


def test_texts_share_calls_where_levels_have_profiles(tmp_path: Path) -> None:
    # Of any number of tokens, so that only calls count.
    for name, ms in (("small.json", 2.0), ("large.json", 9.0)):
        (tmp_path / name).write_text(json.dumps({"lengths": [8, 512], "latency_ms": [ms, ms + 504e-9]}))
    law = replace(LAW, profiles=f"{tmp_path / 'small.json'},{tmp_path / 'large.json'}")
    result = run(law, TWO, np.array([[0.0, 0.0, 0.0, 0.9]]), texts([0.0] * 4, 8))
    # The first text goes alone, the others together; at the second level, too.
    assert result.latency_ms == pytest.approx([12.0, 21.0, 21.0, 4.0], abs=1e-3)
    with pytest.raises(InvalidInputError, match="profiles: got .*; one for each of 2 levels"):
        run(replace(LAW, profiles="small.json"), TWO, np.zeros((1, 1)), texts([0.0]))


def test_a_full_first_level_refuses_texts_and_a_full_later_one_lets_them_keep_their_answers() -> None:
    slow = replace(TWO, model_latencies=(2.0, 90_000.0))
    result = serve([0.0] * 5000, [0.0] * 5000, slow, engine_threads=2, instances=1)
    assert (result.level == 0).sum() > 800 and np.isnan(result.latency_ms[result.level == 0]).all()
    assert result.fell_back.sum() == (result.level == 1).sum() > 0


def test_texts_keep_their_answer_where_the_later_level_dies() -> None:
    result = serve([0.0] * 4, [0.0, 0.005, 0.02, 0.1], kill_s=0.01, recovery_s=0.05)
    assert result.fell_back.tolist() == [True, True, True, False]
    assert result.level.tolist() == [1, 1, 1, 2]
    # The first runs there when it dies; the second waits behind it, the third finds it dead.
    assert result.latency_ms == pytest.approx([10.0, 5.0, 3.0, 12.0])


def test_drawn_confidences_give_the_profiled_shares_and_times() -> None:
    table = candidates.serving(FOLDER, "clinc150").table
    confidence = drawn_confidence(table, table.models[0].name, 6_000, np.random.default_rng(0))[None]
    for one in [one for one in table.candidates if one.gaps and one.gaps[0].c <= 0.8]:
        result = run(replace(LAW, hop_ms=0.0), one, confidence, texts(range(6_000)))
        assert (result.level == 1).mean() == pytest.approx(one.shares[0], abs=0.02)
        assert result.latency_ms.mean() == pytest.approx(one.latency_ms, rel=0.1)
