"""The demo: a load that changes shape the same way each time, turns on a real server, and an honest table."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

from bench.demo import plot, workers
from bench.demo.__main__ import Stage
from bench.demo.fronts import ADAPTERS, BASELINES, publish
from bench.demo.gains import Turn, rows
from bench.demo.load import BUSY, Answer, Request, requests
from shapeshift.errors import NotFoundError
from shapeshift.serving.events import Event
from shapeshift.triton.embedded.server import TritonServer
from shapeshift.triton.settings import ServerSettings
from tests.live.servers import view


def test_each_turn_has_the_same_load_and_it_changes_shape() -> None:
    load, again = (requests(BUSY, 30, ADAPTERS) for _ in range(2))
    assert [(one.at, one.front, str(one.inputs), one.parameters) for one in load] == [
        (one.at, one.front, str(one.inputs), one.parameters) for one in again
    ]
    lengths = [(one.at, len(one.inputs["TEXT"][0][0])) for one in load if one.front == "encode"]
    means = [fmean(length for at, length in lengths if start <= at < start + 5) for start in (0, 12.5, 25)]
    assert means[1] > 5 * max(means[0], means[2])
    named = [(int(4 * one.at / 30), one.parameters["lora_name"]) for one in load if one.front == "generate_lora"]
    parts = [[name for _, name in part] for _, part in groupby(named, key=lambda each: each[0])]
    favourites = [max(part, key=part.count) for part in parts]
    assert len(set(favourites)) == 4
    images = [one.at for one in load if one.front == "classify_image"]
    assert sum(at % 10 < 2.5 for at in images) > 0.4 * len(images)


def turn(milliseconds: float, unanswered: int = 0) -> Turn:
    answers = [Answer("classify_text", milliseconds / 1e3)] * 2 + [Answer("classify_text", inf, "late")] * unanswered
    return Turn("classify_text", 10.0, view({}, {}), answers)


@pytest.mark.parametrize(("ours", "baseline", "times"), [(20.0, 30.0, "1.50"), (30.0, 15.0, "0.50")])
def test_the_table_says_where_ours_loses(ours: float, baseline: float, times: str) -> None:
    (row,) = rows("classify_text", [turn(ours), turn(ours, unanswered=1)], [turn(baseline)], "always the large model")
    assert row["times"] == times and row["ours"] == pytest.approx(ours)


def test_answers_that_do_not_come_count_for_the_workers() -> None:
    late, all_there = turn(20.0, unanswered=2), turn(30.0)
    answered, mean = rows("encode_workers", [all_there], [late], "the first plan")
    assert (answered["ours"], answered["baseline"], answered["times"]) == (100.0, 50.0, "2.00")
    assert mean["times"] == "0.67"


def test_the_plot_of_the_workers_is_that_of_the_result(tmp_path: Path) -> None:
    plot.draw(json.loads(plot.RESULT.read_text())["workers"], tmp_path / "workers.svg")
    drawn = (tmp_path / "workers.svg").read_text()
    assert drawn == plot.PLOT.read_text() and len(drawn) < 60_000
    words = [one.text or "" for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "the first plan, frozen: 200 of 798 fail, mean 3.31 s" in words and "no answer" in words
    assert {"worker 4", "64", "128", "256", "512"} <= {*words}


def test_a_turn_of_the_workers_is_what_was_sent_and_who_computed_it() -> None:
    calls = [
        Event("pack", at, {"thread": "MainThread", "size": size, "tokens": 9, "texts": [9], "ms": 100.0})
        for at, size in ((2.0, 64), (4.0, 64), (8.0, 256))
    ]
    sent = [Request(at, "encode_workers", {"TEXT": [["a b c"]]}, {}) for at in (0.5, 1.5)]
    answers = [Answer("encode_workers", 0.25), Answer("encode_workers", inf, "late")]
    played = workers.played(
        Turn("encode_workers", 9.0, view({}, {}, {"encode_workers_w01": calls}), answers, 1.0, sent)
    )
    assert played["texts"] == [(0.5, 3, 0.25), (1.5, 3, None)]
    assert played["bins"] == {
        "encode_workers_w00": [],
        "encode_workers_w01": [(64, 0.9, 3.0), (256, 6.9, 7.0)],
        "encode_workers_w02": [],
        "encode_workers_w03": [],
    }


@pytest.mark.server
def test_ours_and_the_baseline_take_turns(server_settings: Callable[..., ServerSettings], tmp_path: Path) -> None:
    try:
        repository = publish()
    except NotFoundError as error:
        pytest.skip(str(error))
    models = ("encode", "encode_any_length")
    with TritonServer(server_settings((repository,), models, tmp_path / "run")) as server:
        stage = Stage(server.wait_ready(timeout_s=300))
        ours, baseline = (stage.turn("encode", {"encode": 2.5}, 16.0, one) for one in (None, BASELINES["encode"]))
    assert ours.answers and len(ours.answers) == len(baseline.answers)
    assert [answer.error for answer in (*ours.answers, *baseline.answers) if answer.error] == []
    assert ours.total("engine_rows_total") == baseline.total("engine_rows_total") == len(ours.answers)
    table = rows("encode", [ours], [baseline], "one engine")
    assert [row["measure"] for row in table][-1] == "tokens computed (estimate)"
    assert all(isinstance(row["ours"], float | int) and row["ours"] > 0 for row in table)
