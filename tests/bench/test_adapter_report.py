from __future__ import annotations

import numpy as np
import pytest

from bench import adapter_cache, adapter_turns
from bench import adapter_report as report
from bench.adapter_loads import RANKS, Lengths, adapters, draw
from bench.adapter_report import Outcome


def outcome(first: np.ndarray, loaded: float = 0.0) -> Outcome:
    ranks = np.resize(np.array(RANKS), len(first))
    return Outcome(ranks, first, first + 1, np.full(10, 0.02), loaded, 3.0, 1.0, 10.0)


def test_figures_of_a_run() -> None:
    runs = [outcome(np.linspace(1, 2, 101), loaded=101 * 2**20), outcome(np.linspace(1, 2, 101))]
    assert report.first_ms(runs, 50) == pytest.approx(1550, abs=10), "the first tenth is left out"
    assert report.between_ms(runs, 99) == pytest.approx(20)
    assert report.megabytes(runs) == pytest.approx(0.5)
    assert report.hit_ratio(runs) == 0.75
    assert report.longest_s(runs) == 2
    assert report.served_per_s(runs) == pytest.approx(10.1)
    assert set(report.record(runs)) >= {"first_p99_ms", "hit_ratio"}


def test_ratios_and_their_intervals() -> None:
    rng = np.random.default_rng(0)
    slow = rng.exponential(1.0, 2000)
    value, low, high = report.ratio([outcome(slow / 2)], [outcome(slow)], 99)
    assert value == pytest.approx(0.5) and low <= 0.5 <= high
    value, low, high = report.ratio([outcome(rng.exponential(1.0, 2000))], [outcome(slow)], 99, rank=RANKS[0])
    assert low < 1 < high
    assert "rank 128" in report.by_rank([outcome(slow)], [outcome(slow)], ("one", "other"))
    calm, fair = rng.exponential(1.0, 400), outcome(rng.exponential(1.0, 400))
    value, low, high = report.ratio([outcome(calm), outcome(3 * calm)], [fair, fair], 50)
    assert low < 1.3 and high > 2.5, "a run that fell on a slow stretch may be left out as well as drawn twice"
    assert "longest s" in report.table("load", {"one": [outcome(slow)]})


def test_the_load_at_which_the_objective_is_reached() -> None:
    loads = (0.5, 0.7, 0.9)
    assert report.at_objective(loads, (100, 200, 400), 300) == pytest.approx(0.8)
    assert report.at_objective(loads, (100, 200, 250), 300) == 0.9
    assert report.at_objective(loads, (600, 700, 800), 300) == pytest.approx(0.25)


def test_loads_follow_their_laws() -> None:
    known = adapters(1000)
    assert len(known) == 100 and {one.rank for one in known.values()} == set(RANKS)
    assert known["r128-03"].bytes == 128_000
    lengths = Lengths(np.array([10, 20]), np.array([3, 4]))
    asks = draw(lengths, known, 50.0, 20_000, np.random.default_rng(0))
    assert asks[-1].at_s == pytest.approx(400, rel=0.03)
    counts = [sum(ask.adapter.startswith(f"r{rank}-") for ask in asks) for rank in RANKS]  # type: ignore[union-attr]
    assert np.array(counts) / counts[0] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], rel=0.1)
    assert {(ask.prompt_tokens, ask.answer_tokens) for ask in asks} == {(10, 3), (20, 4)}
    again = draw(lengths, known, 50.0, 20_000, np.random.default_rng(0))
    assert asks == again


def test_a_load_that_no_time_was_left_for_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    run = adapter_cache.Run(adapter_cache.QUICK, 0, "f32")
    run._of_load("load 80%", {})
    run._of_load("load 90%", {report.DEFAULT: [outcome(np.linspace(1, 2, 20))]})
    assert not run.text and not run.data and not capsys.readouterr().out


def test_of_runs_of_the_same_requests_each_request_has_its_median() -> None:
    times = np.linspace(1, 2, 11)
    slow = times.copy()
    slow[3] = 9.0
    made = report.typical([outcome(times, loaded=3.0), outcome(slow), outcome(times + 0.1)])
    assert made.first_s.tolist() == np.where(np.arange(11) == 3, times + 0.1, times).tolist()
    assert made.loaded_bytes == 1.0 and len(made.between_s) == 30
    assert report.hit_ratio([made]) == 0.75


def test_turns_are_shown_draw_by_draw() -> None:
    times = np.linspace(1, 2, 101)
    runs = {
        report.DEFAULT: {0: [outcome(times / 2)] * 2 + [outcome(times * 5)], 1: [outcome(times)] * 3},
        report.PLAIN: {0: [outcome(times)] * 3, 1: [outcome(times)] * 3},
    }
    lines = adapter_turns.table("turns", runs).splitlines()
    assert "geometric mean of the draws' ratios 0.71  (0.50 to 1.00)" in lines.pop()
    assert [line.split()[-1] for line in lines[-2:]] == ["0.50", "1.00"]
    shown = [float(part) for part in lines[-2].split()[1:4]]
    assert shown == pytest.approx([995.5, 995.5, 9955], abs=1), "all runs are shown, the median counts"
