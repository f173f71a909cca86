"""The shares of two busy models."""

from __future__ import annotations

import pytest

from bench.common.cells import Run
from bench.shared_cores import Answered, loads, pair_row


def test_every_model_alone_and_every_pair() -> None:
    assert loads(("a", "b", "c")) == [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")]


def test_shares_are_of_half_the_rate_alone_in_the_same_round() -> None:
    # The second round has twice the foreign load: the rates alone are halved, the shares stay.
    measured = [(100.0, 60.0, 20.0), (50.0, 30.0, 20.0), (100.0, 50.0, 10.0)]
    rounds = {
        "a": [Run(Answered({"a": alone}, {"a": 100}), 0.0, 1.0) for alone, _, _ in measured],
        "b": [Run(Answered({"b": 50.0}, {"b": 10}), 0.5, 2.0) for _ in measured],
        "a and b": [Run(Answered({"a": a, "b": b}, {"a": 50, "b": 5}), 0.0, 1.5) for _, a, b in measured],
    }
    pair = pair_row(("a", "b"), rounds)
    assert pair["pair"] == "a and b"
    assert (pair["share 1"], pair["share 2"]) == pytest.approx((1.2, 0.8))
    assert (pair["both"], pair["least"], pair["most"]) == pytest.approx((1.0, 0.7, 1.0))
    # 50 answers of 10 ms and 5 of 200 ms.
    assert pair["of CPU"] == pytest.approx(1.0)
