from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.adapter_cache import report, server
from bench.adapter_cache.loads import Lengths, adapter_set, draw
from bench.adapter_cache.report import AdapterRun
from bench.common.cells import Cells, Run
from shapeshift.workloads.adapters import RANKS


def a_run(first: NDArray[np.float64], loaded: float = 0.0) -> AdapterRun:
    return AdapterRun(first, first + 1, np.full(10, 0.02), loaded, 3.0, 1.0, 10.0)


def test_figures_of_a_run() -> None:
    runs = [a_run(np.linspace(1, 2, 101), loaded=101 * 2**20), a_run(np.linspace(1, 2, 101))]
    figures = report.record(runs)
    assert figures["first_p50_ms"] == pytest.approx(1550, abs=10), "the first tenth is left out"
    assert figures["between_p99_ms"] == pytest.approx(20)
    assert figures["mb_per_request"] == pytest.approx(0.5)
    assert figures["hit_ratio"] == 0.75
    assert figures["longest_s"] == 2
    assert figures["served_per_s"] == pytest.approx(10.1)


def test_ratios_and_their_intervals() -> None:
    rng = np.random.default_rng(0)
    slow = rng.exponential(1.0, 2000)
    value, low, high = report.ratio([a_run(slow / 2)], [a_run(slow)], 99)
    assert value == pytest.approx(0.5) and low <= 0.5 <= high
    value, low, high = report.ratio([a_run(rng.exponential(1.0, 2000))], [a_run(slow)], 99)
    assert low < 1 < high
    assert [row["first token"] for row in report.ratios([a_run(slow)], [a_run(slow)])] == ["p50", "p99"]
    calm, fair = rng.exponential(1.0, 400), a_run(rng.exponential(1.0, 400))
    value, low, high = report.ratio([a_run(calm), a_run(3 * calm)], [fair, fair], 50)
    assert low < 1.3 and high > 2.5, "a slow run may be left out or drawn twice"


def test_loads_follow_their_laws() -> None:
    adapters = adapter_set(1000)
    assert len(adapters) == 100 and {adapter.rank for adapter in adapters.values()} == set(RANKS)
    assert adapters["r128-03"].bytes == 128_000
    lengths = Lengths(np.array([10, 20]), np.array([3, 4]))
    requests = draw(lengths, len(adapters), 50.0, 20_000, np.random.default_rng(0))
    assert requests[-1].at_s == pytest.approx(400, rel=0.03)
    counts = [sum(request.adapter.startswith(f"r{rank}-") for request in requests) for rank in RANKS]  # type: ignore[union-attr]
    assert np.array(counts) / counts[0] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], rel=0.1)
    assert {(request.prompt_tokens, request.answer_tokens) for request in requests} == {(10, 3), (20, 4)}
    again = draw(lengths, len(adapters), 50.0, 20_000, np.random.default_rng(0))
    assert requests == again


def test_runs_of_the_same_requests_give_the_median_of_each_request() -> None:
    times = np.linspace(1, 2, 11)
    slow = times.copy()
    slow[3] = 9.0
    median = report.typical([a_run(times, loaded=3.0), a_run(slow), a_run(times + 0.1)])
    assert median.first_s.tolist() == np.where(np.arange(11) == 3, times + 0.1, times).tolist()
    assert median.loaded_bytes == 1.0 and len(median.between_s) == 30
    assert report.record([median])["hit_ratio"] == 0.75


def test_repeats_are_shown_draw_by_draw_by_their_medians() -> None:
    times = np.linspace(1, 2, 101)
    cells: Cells[AdapterRun] = Cells(lambda run: {"first_p99_ms": report.first_ms([run.result], 99)})
    for name, ours in (("draw 0", [times / 2, times / 2, times * 5]), ("draw 1", [times] * 3)):
        for first in ours:
            cells.keep(name, report.DEFAULT, Run(a_run(first), 0.5, 0.0))
            cells.keep(name, report.PLAIN, Run(a_run(times), 0.25, 0.0))
    lines = server.tables(cells).splitlines()
    assert lines.pop().split()[-2:] == ["0.50", "cores"]
    assert "geometric mean of the draws' ratios 0.71  (0.50 to 1.00)" in lines.pop()
    assert [line.split()[-1] for line in lines[-2:]] == ["0.5", "1"]
    assert report.record(server.every(cells)[report.DEFAULT])["runs"] == 6
