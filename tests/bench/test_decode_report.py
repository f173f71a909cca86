"""Cells, tables and ratios of the decode benchmark, over fake systems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest

from bench.fused_decode import bound, report
from bench.fused_decode.__main__ import ALL, KEYS, run
from bench.fused_decode.cells import (
    CONTINUOUS,
    GENAI,
    LLAMA_CPP,
    OURS,
    STATIC,
    TRITON,
    UNARY,
    DecodeBench,
    Scale,
)
from bench.fused_decode.loads import Load, LoadGenerator
from bench.fused_decode.systems import DecodeSystem
from bench.peers.protocol import Replayed

SCALE = Scale(requests=8, new_tokens=4, rounds=2, flights=(2,), poisson=(50,), budget_s=100.0)
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
        tokens = [[self.token] * request.new_tokens for request in load.requests]
        return Replayed(stamps, tokens, {"iterations": 8.0} if self.name == OURS else {})


def measured(scale: Scale) -> DecodeBench:
    steps = {OURS: 0.01, TRITON: 0.0125, UNARY: 0.01, GENAI: 0.02, STATIC: 0.03, CONTINUOUS: 0.04, LLAMA_CPP: 0.015}
    systems: dict[str, DecodeSystem] = {
        name: FakeSystem(name, step, token=1 + (name == STATIC)) for name, step in steps.items()
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


def test_ours_over_every_other_system(bench: DecodeBench) -> None:
    rows = {(row["load"], row["over"]): row for row in report.ratios(bench, LIMITS)}
    burst = "8 at once"
    for system, faster in {STATIC: 3.0, GENAI: 2.0, LLAMA_CPP: 1.5, TRITON: 1.25, UNARY: 1.0}.items():
        assert rows[burst, system]["tokens/s"] == pytest.approx(faster)
        assert rows[burst, system]["first token"] == pytest.approx(1 / faster)
    assert rows["alone", GENAI]["tokens/s"] == pytest.approx(2.0)
    assert rows[burst, GENAI]["same"] == 1.0 and rows[burst, STATIC]["same"] == 0.0
    assert rows[burst, "ours alone"]["tokens/s"] == pytest.approx(8.0)
    assert rows[burst, "ours alone"]["a request's time"] == pytest.approx(1.0)
    (share,) = [row["tokens/s"] for (load, over), row in rows.items() if load == burst and "the bound" in str(over)]
    assert cast("float", share) == pytest.approx(bench.rate(burst, OURS) / LIMITS.per_second(8, 4))


def test_tables_name_every_system(bench: DecodeBench) -> None:
    text = report.tables(bench, LIMITS)
    for system in (OURS, TRITON, UNARY, GENAI, LLAMA_CPP, STATIC, CONTINUOUS):
        assert f"\n  {system} " in text
    assert "out of time" not in text


def test_cells_beyond_the_time_budget_are_named() -> None:
    assert "not measured, out of time: " in report.tables(measured(replace(SCALE, budget_s=0.0)), LIMITS)


def test_systems_can_be_named_on_a_command_line() -> None:
    assert [KEYS[key] for key in KEYS] == list(ALL)
    assert {"ours-through-triton", "openvino-genai", "static-batch"} <= KEYS.keys()
    assert all(set(key).isdisjoint(", \"'") for key in KEYS)
