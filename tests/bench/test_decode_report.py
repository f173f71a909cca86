"""Cells, tables, ratios and plots of the decode benchmark, over fake systems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.fused_decode import beams, bound, cells, plots, report
from bench.fused_decode.__main__ import ALL, KEYS, run
from bench.fused_decode.cells import (
    BUSY,
    CONTINUOUS,
    GENAI,
    INSTANCES,
    LLAMA_CPP,
    OURS,
    STATIC,
    TRITON,
    UNARY,
    WINDOWS,
    DecodeBench,
    Scale,
)
from bench.fused_decode.loads import Load, LoadGenerator
from bench.fused_decode.systems import DecodeSystem
from bench.peers.decode_worker import Replayed

SCALE = Scale(
    requests=8, new_tokens=4, rounds=2, flights=(2,), poisson=(50,), fig5=(100,), lengths=True, budget_s=100.0
)
LIMITS = report.Limits(bound.Machine(1e9, 1e9), bound.Model(1000, 200, 10, 5), "f32")


@dataclass
class FakeSystem:
    """Gives each request a token every `step_s`, the first after twice that."""

    name: str
    step_s: float
    token: int = 1

    def replay(self, load: Load) -> Replayed:
        stamps = [
            [request.at_s + self.step_s * (2 + at) for at in range(request.new_tokens)] for request in load.requests
        ]
        extra = {"iterations": 8.0, "model_ms": 96.0, "sampling_ms": 3.0, "rest_ms": 1.0}
        extras = {OURS: extra, TRITON: {"responses": load.tokens / 2}}
        tokens = [[self.token] * request.new_tokens for request in load.requests]
        return Replayed(stamps, tokens, extras.get(self.name, {}))


def measured(scale: Scale) -> DecodeBench:
    steps = {OURS: 0.01, TRITON: 0.0125, UNARY: 0.01, GENAI: 0.02, STATIC: 0.03, CONTINUOUS: 0.04, INSTANCES: 0.2}
    steps |= {LLAMA_CPP: 0.015} | dict.fromkeys(WINDOWS, 0.05)
    systems: dict[str, DecodeSystem] = {
        name: FakeSystem(name, step, token=1 + (name == INSTANCES)) for name, step in steps.items()
    }
    bench = DecodeBench(scale, LoadGenerator(0, range(10), scale.new_tokens), seed=0)
    run(bench, systems)
    return bench


@pytest.fixture(scope="module")
def bench() -> DecodeBench:
    return measured(SCALE)


def test_all_cells_of_a_load_have_the_same_requests(bench: DecodeBench) -> None:
    loads = {system: bench.runs["8 at once", system][0].load for system in (OURS, TRITON, GENAI, STATIC, CONTINUOUS)}
    assert len({id(load) for load in loads.values()}) == 1
    assert len(bench.runs["8 at once", OURS]) == 2
    assert len(bench.runs["8 at once", INSTANCES]) == 1


def test_ratios(bench: DecodeBench) -> None:
    rows = list(report.ratios(bench, LIMITS))
    found = {what: (value, goal) for what, value, goal in rows}
    assert len(found) == len(rows)
    faster, goal = found["8 at once: tokens/s over concurrent instances"]
    (share,) = (value for what, (value, _) in found.items() if what.startswith("8 at once: share of the bound"))
    assert faster == pytest.approx(20.0) and goal.startswith("15 or more; the bound allows")
    assert float(goal.split()[-1]) == pytest.approx(20.0 / share, rel=1e-3)
    alone, allowed = found["alone: tokens/s over concurrent instances"]
    assert alone == pytest.approx(20.0) and allowed.startswith("the bound allows")
    assert found["8 at once: tokens/s over static batch"][0] == pytest.approx(3.0)
    assert found["8 at once: tokens/s over OpenVINO GenAI"][0] == pytest.approx(2.0)
    assert found["8 at once: time to first token over OpenVINO GenAI's"][0] == pytest.approx(0.5)
    assert found["8 at once: tokens/s over llama.cpp"][0] == pytest.approx(1.5)
    assert found["alone: tokens/s over OpenVINO GenAI"][0] == pytest.approx(2.0)
    assert found["8 at once: tokens/s through Triton in streams over in-process"][0] == pytest.approx(0.8)
    assert found["8 at once: tokens/s through Triton in plain requests over in-process"][0] == pytest.approx(1.0)
    assert found["8 at once: tokens of a response of a stream"][0] == 2
    assert found["8 at once: generating thread's time outside the model"][0] == pytest.approx(0.04)
    assert found["8 at once: tokens/s over ours alone"][0] == pytest.approx(8.0)
    assert found["8 at once: share of the first 16 tokens as of OpenVINO GenAI"][0] == 1.0
    assert found["8 at once: share of the first 16 tokens as of concurrent instances"][0] == 0.0
    assert found[f"8 at once: tokens/s {BUSY} over undisturbed, ours"] == (pytest.approx(1.0), "0.45 or more")


def test_the_part_of_beam_search() -> None:
    """Alone: the other loads are not measured, and nothing is said of them."""
    steps = {OURS: 0.01, beams.BATCH: 0.06, beams.ONE_BY_ONE: 0.1}
    own = DecodeBench(SCALE, LoadGenerator(0, range(10), SCALE.new_tokens), seed=0)
    beams.measure(own, [FakeSystem(name, step) for name, step in steps.items()])
    found = {what: (value, goal) for what, value, goal in report.ratios(own, LIMITS)}
    assert found[f"{beams.LOAD}: tokens/s over {beams.BATCH}"] == (pytest.approx(6.0), "5 or more")
    assert found[f"{beams.LOAD}: tokens/s over {beams.ONE_BY_ONE}"] == (pytest.approx(10.0), "")
    assert found[f"{beams.LOAD}: share of the first 16 tokens as of {beams.BATCH}"] == (1.0, "")
    assert len(found) == 4 and beams.LOAD in report.tables(own, LIMITS)


def test_tables_name_every_system_and_the_papers_iterations(bench: DecodeBench) -> None:
    text = report.tables(bench, LIMITS)
    for system in (OURS, TRITON, UNARY, GENAI, LLAMA_CPP, STATIC, CONTINUOUS, INSTANCES, *WINDOWS):
        assert f"\n  {system} " in text
    ours, instances = (bench.runs[bench.poisson[50], system][0].span_s for system in (OURS, INSTANCES))
    measured = ["50", "8", "2.00", "1.20", "50.0%", f"{ours:.1f}", f"{instances / ours:.1f}", "11.1"]
    assert text.splitlines()[-2].split() == measured
    assert "out of time" not in text


def test_cells_are_plain_records(bench: DecodeBench) -> None:
    records = report.cells(bench, LIMITS)
    assert records[-1] == {"gemm_gflops": 1.0, "read_gbytes": 1.0}
    assert {"load", "system", "tokens_per_second", "foreign"} <= set(records[0])


def test_plots(bench: DecodeBench, tmp_path: Path) -> None:
    drawn = plots.draw(bench, tmp_path)
    assert len(drawn) == 2
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_figures_without_measurements_are_not_drawn(tmp_path: Path) -> None:
    assert not plots.draw(DecodeBench(SCALE, LoadGenerator(0, range(10), 4), seed=0), tmp_path)


def test_cells_beyond_the_time_budget_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr(cells.time, "monotonic", lambda: float(next(clock)))
    text = report.tables(measured(SCALE), LIMITS)
    assert "not measured, out of time: " in text


def test_systems_can_be_named_on_a_command_line() -> None:
    assert [KEYS[key] for key in KEYS] == list(ALL)
    assert {"ours-through-triton", "openvino-genai", "dynamic-0.5-s", "static-batch"} <= KEYS.keys()
    assert all(set(key).isdisjoint(", \"'") for key in KEYS)
