from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.workloads import adapters
from shapeshift.workloads.load import ARRIVALS, Load


@pytest.mark.parametrize("arrivals", [name for name in ARRIVALS if name != "csv"])
def test_the_same_seed_gives_the_same_requests(arrivals: str) -> None:
    load = Load(arrivals, rate=200.0, duration_s=20.0, lengths="long", drift=0.2, adapters=10, otas=True)
    one, again, other = load.draw(1), load.draw(1), load.draw(2)
    assert len(one) == pytest.approx(4000, rel=0.8)
    for name, column in one.columns().items():
        assert np.array_equal(column, again.columns()[name]), name
    assert not np.array_equal(one.length, other.length)


def test_lengths_may_be_drawn_from_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("at_s,length,output_length\n0,10,1\n9,900,7\n")
    drawn = Load(rate=100.0, lengths=str(file), length_factor=0.5, max_length=400).draw(0)
    assert {*zip(drawn.length.tolist(), drawn.output_length.tolist(), strict=True)} == {(5, 1), (400, 7)}


def test_a_trace_ends_in_time_and_keeps_its_deadlines(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("at_s,length,latency_ms\n0,10,50\n1,20,\n9,30,70\n")
    drawn = Load("csv", trace=str(file), rate_factor=2.0, duration_s=2.0, latency_ms=99.0).draw(0)
    assert (drawn.at_s.tolist(), drawn.latency_ms.tolist()) == ([0.0, 0.5], [50.0, 0.0])


def test_small_ranks_are_named_most() -> None:
    named = adapters.names(50, 20_000, np.random.default_rng(0))
    ranks = adapters.ranks(50)
    assert len(ranks) == 50 and {*named} == {*ranks}
    counts = np.array([sum(ranks[name] == rank for name in named) for rank in adapters.RANKS])
    assert counts / len(named) == pytest.approx(np.array([60, 30, 20, 15, 12]) / 137, abs=0.02)


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"arrivals": "pareto"}, "arrivals: got 'pareto'; one of poisson"),
        ({"trace": "x.csv"}, "trace"),
        ({"arrivals": "csv"}, "trace"),
        ({"arrivals": "csv", "trace": "absent.csv"}, "absent.csv"),
        ({"lengths": "medium"}, "lengths: got 'medium'"),
        ({"rate": 0.0}, "rate"),
        ({"duration_s": -1.0}, "duration_s"),
        ({"drift": -1.0}, "drift"),
    ],
)
def test_bad_loads_are_refused(stated: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        Load(**stated).draw(0)  # type: ignore[arg-type]
    assert says in str(refused.value)
