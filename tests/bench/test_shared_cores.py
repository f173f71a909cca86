"""The shares of two busy models."""

from __future__ import annotations

import pytest

from bench.shared_cores import Cell, alone_rows, loads, pair_rows


def test_every_model_alone_and_every_pair() -> None:
    assert loads(("a", "b", "c")) == [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")]


def test_shares_are_of_half_the_rate_alone_in_the_same_round() -> None:
    def cells(alone: float, a: float, b: float, cpu_s: float) -> dict[tuple[str, ...], Cell]:
        return {
            ("a",): Cell({"a": alone}, {"a": 100}, 1.0, 0.0),
            ("b",): Cell({"b": 50.0}, {"b": 10}, 2.0, 0.5),
            ("a", "b"): Cell({"a": a, "b": b}, {"a": 50, "b": 5}, cpu_s, 0.0),
        }

    # The second round has twice the foreign load: the rates alone are halved, the shares stay.
    rounds = [cells(100.0, 60.0, 20.0, 1.5), cells(50.0, 30.0, 20.0, 1.5), cells(100.0, 50.0, 10.0, 2.0)]
    (pair,) = pair_rows(rounds)
    assert pair["pair"] == "a and b"
    assert (pair["share 1"], pair["share 2"]) == pytest.approx((1.2, 0.8))
    assert (pair["both"], pair["least"], pair["most"]) == pytest.approx((1.0, 0.7, 1.0))
    # 50 answers of 10 ms and 5 of 200 ms.
    assert pair["of CPU"] == pytest.approx(1.0)
    assert [(row["alone"], row["CPU ms"]) for row in alone_rows(rounds)] == [("a", 10.0), ("b", 200.0)]
