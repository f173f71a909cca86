"""The times of `bench.fidelity` from recorded numbers, and the rows of its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.fidelity import calibration, comparison
from bench.fidelity.calibration import Counted
from bench.fidelity.fronts import Sections, Sent, Texts
from shapeshift.workloads.trace import Trace

PROFILE: dict[str, Any] = {
    "hardware": "a machine",
    "engines": [
        {"tokens": None, "rows": None, "latency": [[10, 5.0, 6.0, 4.0], [100, 50.0, 60.0, 40.0]]},
        {"tokens": 20, "rows": 2, "latency": [[20, 6.0, 7.0, 5.0]]},
        {"tokens": 200, "rows": 2, "latency": [[200, 80.0, 90.0, 70.0]]},
    ],
}


def pack(tokens: int, ms: float, size: int | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "size": size or tokens, "ms": ms, "texts": [tokens]}


def test_a_profile_gets_the_times_of_calls_and_keeps_what_decides() -> None:
    # A front twice as slow as its profile says, whose calls are twice as slow at half of the length, too.
    packs = [pack(10, 10.0), pack(55, 55.0), pack(100, 100.0), pack(15, 12.0, 20)] * 30
    profile = calibration.text_profile(PROFILE, packs)
    any_length, short, long = (np.array(engine["latency"]) for engine in profile["engines"])
    assert any_length[:, 1] == pytest.approx([10.0, 100.0], rel=0.01)
    assert short[0, 1] == pytest.approx(12.0, rel=0.01)
    assert long[0, 1] == pytest.approx(160.0, rel=0.01), "no call: as much slower as the others"
    before = [np.array(engine["latency"]) for engine in PROFILE["engines"]]
    for old, new in zip(before, (any_length, short, long), strict=True):
        assert new[:, [0, 3]].tolist() == old[:, [0, 3]].tolist()
        assert new[:, 2] == pytest.approx(new[:, 1], rel=0.01), "equal calls took equally long"
    spread = [pack(20, ms, 20) for ms in np.linspace(8.0, 16.0, 101).tolist()]
    short = np.array(calibration.text_profile(PROFILE, spread)["engines"][1]["latency"])
    assert short[0, 1:3] == pytest.approx([12.0, 15.92], rel=0.02)


def test_images_have_times_by_gamma_and_batch() -> None:
    entry = {"tokens": 19, "memory_mb": 3.4, "precision": "f32"}
    latency = [[1, 60.0, 80.0, 50.0], [4, 220.0, 300.0, 200.0]]
    profile = {"gammas": [{"gamma": gamma, **entry, "latency": latency} for gamma in (-20, 0)]}
    batches = [{"gamma": 0, "images": images, "ms": 75.0 * images} for images in (1, 2, 4)] * 30
    merged, plain = calibration.image_profile(profile, batches)
    assert plain["latency_ms"] == pytest.approx({"1": 75.0, "4": 300.0}, rel=0.01)
    assert merged["latency_ms"] == pytest.approx({"1": 75.0, "4": 300.0}, rel=0.01)
    assert merged["gamma"] == -20 and merged["memory_mb"] == 3.4 and merged["tokens"] == 19


def test_iterations_are_divided_into_their_work() -> None:
    def load(iterations: int, rows: int, prompt: int, ranks: int) -> Counted:
        return Counted(iterations, 20.0 * iterations + 2.0 * rows + 0.5 * prompt + 0.01 * ranks, rows, prompt, ranks)

    loads = [load(100, 100, 400, 0), load(60, 500, 900, 9000), load(90, 300, 6000, 2000), load(200, 900, 100, 800)]
    times = calibration.iteration_times(loads)
    assert times == pytest.approx({"base_s": 0.02, "row_s": 0.002, "token_s": 0.0005, "rank_s": 0.00001})
    without = calibration.iteration_times([load(100, 100, 400, 0), load(60, 500, 900, 0), load(90, 300, 6000, 0)])
    assert without == pytest.approx({"base_s": 0.02, "row_s": 0.002, "token_s": 0.0005})


def test_a_call_to_a_cascades_second_level_is_told_apart() -> None:
    level, engine_ms = np.array([1, 2, 1, 2]), np.array([2.0, 12.0, 2.0, 12.0])
    times = calibration.level_times(engine_ms + np.array([1.0, 3.0, 1.5, 3.5]), engine_ms, level)
    assert times == pytest.approx((1.25, 2.0))


def test_what_requests_take_beside_the_simulation_is_measured_on_other_traces(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps({"lengths": [10, 100], "latency_ms": [20.0, 20.0]}))
    trace = Trace(np.arange(4.0), np.full(4, 50))
    took_ms = [np.array([took, took, took, np.nan]) for took in (26.0, 28.0)]
    like = [Sent(trace, took, took) for took in took_ms]
    stated: Sections = {"polymorph": {"profile": "profile.json"}, "sidecar": {"change_s": 2.0}}
    sections = comparison.with_rest(tmp_path, Texts("encode"), stated, like)
    assert sections["sidecar"] == {"change_s": 2.0, "overhead_ms": pytest.approx(7.0)}
    for sent in like:
        sent.last_ms[:] = 1.0
    assert comparison.with_rest(tmp_path, Texts("encode"), stated, like)["sidecar"]["overhead_ms"] == 0.0


def test_a_row_says_how_far_the_simulation_is_off(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps({"lengths": [10, 100], "latency_ms": [20.0, 20.0]}))
    trace = Trace(np.array([0.0, 1.0, 2.0]), np.array([10, 50, 100]))
    sections: dict[str, dict[str, object]] = {"polymorph": {"profile": "profile.json"}, "sidecar": {"overhead_ms": 5.0}}
    took_ms = np.array([20.0, 20.0, np.nan])
    outcome = comparison.simulated(tmp_path, "encode", sections, Sent(trace, took_ms, took_ms))
    row = comparison.row("encode", took_ms, outcome)
    assert row == pytest.approx(
        {
            "front": "encode",
            "requests": 3,
            "unanswered": 1,
            "mean ms": 20.0,
            "simulated mean": 25.0,
            "mean off %": 25.0,
            "p98 ms": 20.0,
            "simulated p98": 25.0,
            "p98 off %": 25.0,
        }
    )
