"""The trace of chats beside adapters, and the predictions that are compared on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench.adapter_cache import chats
from bench.adapter_cache.chats import DEMO, NAMES


def test_the_base_is_requested_most_and_the_adapters_by_a_power_law() -> None:
    answers = chats.read()
    drawn = chats.draw(answers, 5.0, 4000, 0)
    counts = Counter(chat.request.adapter or "" for chat in drawn)
    for place, name in enumerate(NAMES, 1):
        assert counts[name] * place == pytest.approx(counts[""], rel=0.2), name
    instants = [chat.request.at_s for chat in drawn]
    assert instants == sorted(instants)
    assert instants[-1] == pytest.approx(4000 / 5, rel=0.1)


def test_each_request_gets_the_prediction_of_its_own_answer() -> None:
    """One slot, where those that wait are served by what is predicted: shortest first."""
    short, long = (chats.read()["clock"][0], max(chats.read()[""], key=lambda chat: chat.predicted))
    assert short.predicted < long.predicted
    waiting = [
        replace(one, request=replace(one.request, at_s=0.001 * at)) for at, one in enumerate([long, long, short])
    ]
    machine = replace(DEMO, slots=1)
    by_length = chats.first_s(machine, "sjf", chats.Listed(waiting), waiting)
    by_arrival = chats.first_s(machine, "arrival", chats.Listed(waiting), waiting)
    assert by_length[2] < by_length[1]
    assert by_arrival[1] < by_arrival[2]


def test_a_table_has_a_line_for_each_load_and_scheduler() -> None:
    tables = chats.measure(1, 40)
    assert tables.keys() == chats.MACHINES.keys()
    for rows in tables.values():
        pairs = [(row["load"], row["scheduler"]) for row in rows]
        assert pairs == [(load, scheduler) for load in chats.LOADS for scheduler in ("sjf", "chameleon")]
        assert all(np.isfinite(float(row["right: mean"])) for row in rows)
