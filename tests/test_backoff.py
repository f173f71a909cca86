"""Pauses between restarts."""

from __future__ import annotations

from shapeshift.backoff import Backoff


def test_pauses_double_up_to_a_limit_and_begin_again() -> None:
    backoff = Backoff(first_s=1, max_s=5, healthy_s=60)
    assert [backoff.pause(2) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert [backoff.pause(61), backoff.pause(2)] == [1, 2]
