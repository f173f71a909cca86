"""What to buy: the answer holds, one worker fewer does not, and an objective that nothing holds names the nearest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapeshift.cli.main import main
from shapeshift.simulate import plan
from shapeshift.simulate.plan import Search
from tests.sampling import few
from tests.simulate.scenarios import PROFILE

CASE = """
seed = 2
[load]
rate = 150
duration_s = 5
lengths = "long"
[slo]
latency_ms = 120
share = 0.98
margin = 0.1
[workers.small]
profile = "profile.json"
price = 1.0
most = 24
packing = false
dynamic = false
[workers.big]
profile = "profile.json"
slower = 0.25
price = 3.0
most = 8
packing = false
dynamic = false
"""
# For what holds of any load.
SHORT = CASE.replace("duration_s = 5", "duration_s = 2").replace("most = 24", "most = 16")
Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `shapeshift plan --json` on a text; returns the status, the answer and standard error."""
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))

    def call(case: str, *arguments: str) -> tuple[int, Any, str]:
        (tmp_path / "plan.toml").write_text(case)
        status = main(["plan", str(tmp_path / "plan.toml"), "--json", *arguments])
        captured = capsys.readouterr()
        return status, json.loads(captured.out) if captured.out else None, captured.err

    return call


def share_in_time(folder: Path, answer: Any, workers: int, objective_ms: float) -> float:
    """Of the case's texts, with its margin, by a simulation of what was bought."""
    case, requests = plan.read(folder / "plan.toml")
    (candidate,) = (
        one
        for one in case.candidates
        if {**one.described, "x": 0}.items() >= {key: answer["best"].get(key) for key in one.described}.items()
        and one.dispatch == answer["parameters"]["dispatch"]
    )
    changed = {"slo_ms": f"{objective_ms:g}", "max_queue_ms": "0", "queue_rows": "1000000"}
    system = candidate.system.with_parameters(changed)
    served = system.run(requests.scaled(1.0 + case.objective.margin), workers=workers)
    return float((np.nan_to_num(served.latency_ms, nan=np.inf) <= objective_ms).mean())


@pytest.mark.parametrize(
    "placement", few(("", 'placement = "partitioned"', 'placement = "resident"'), ("", 'placement = "resident"'))
)
def test_the_answer_holds_and_one_worker_fewer_does_not(run: Run, tmp_path: Path, placement: str) -> None:
    status, answer, _ = run(CASE.replace("[workers.small]", f"[polymorph]\n{placement}\n[workers.small]"))
    assert status == 0
    workers = answer["parameters"]["workers"]
    assert share_in_time(tmp_path, answer, workers, 120.0) >= 0.98
    assert share_in_time(tmp_path, answer, workers - 1, 120.0) < 0.98
    assert answer["best"]["cost"] == min(one["cost"] for one in answer["others"])
    assert answer["best"]["cost"] == workers * {"small": 1.0, "big": 3.0}[answer["best"]["workers of"]]


def test_a_dearer_objective_costs_more(run: Run) -> None:
    _, answer, _ = run(SHORT)
    costs = [point["cost"] for point in answer["curve"] if "cost" in point]
    assert len(costs) >= 3 and costs == sorted(costs, reverse=True)
    tight = run(SHORT.replace("latency_ms = 120", "latency_ms = 40"))[1]
    assert tight["best"]["cost"] > answer["best"]["cost"]
    assert tight["best"]["workers of"] == "big", "a text of 512 tokens takes a small one 100 ms"
    dear = run(SHORT.replace("price = 3.0", "price = 300.0"))[1]
    assert dear["best"]["workers of"] == "small"


def test_an_objective_that_nothing_holds_names_the_nearest(run: Run) -> None:
    status, answer, err = run(SHORT.replace("latency_ms = 120", "latency_ms = 3"))
    assert (status, answer) == (2, None)
    nearest = re.search(r"latency_ms: got 3.0; nothing holds it; the nearest that holds is ([\d.]+) ms", err)
    assert nearest is not None, err
    held = run(SHORT.replace("latency_ms = 120", f"latency_ms = {float(nearest[1]) + 0.1:.1f}"))
    assert held[0] == 0 and held[1]["best"]["tail ms"] > 3
    scarce = run(CASE.replace("most = 24", "most = 1").replace("most = 8", "most = 1"))
    assert scarce[0] == 2 and "nearest that holds" in scarce[2], "more wait than one worker can bear"


def test_a_trace_takes_the_place_of_the_load_and_its_deadlines_count(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("at_s,length,latency_ms\n" + "".join(f"{second / 10},500,60\n" for second in range(100)))
    answer = run(CASE, "--trace", str(file))[1]
    assert answer["best"]["workers of"] == "big", "a small worker takes 98 ms for one"


def test_what_cannot_be_cheaper_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    (tmp_path / "plan.toml").write_text(CASE)
    steps: list[str] = []
    answer = Search(*plan.read(tmp_path / "plan.toml"), steps.append).answer()
    assert all(one.cost >= answer.best.cost for one in answer.others)
    assert len(steps) == len({*steps}), "nothing is simulated twice"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("price = 1.0", "prise = 1.0", "[workers.small]: prise: got 'prise'; unknown parameter; did you mean price?"),
        ("price = 1.0", "", "[workers.small]: price: got None; this parameter is required"),
        ("price = 1.0", "price = -1", "price: got -1.0; above 0"),
        ("share = 0.98", "share = 98", "[slo]: share: got 98.0; above 0 and below 1"),
        ("latency_ms = 120", "latency = 150", "did you mean latency_ms?"),
        ("[slo]\nlatency_ms = 120\nshare = 0.98\nmargin = 0.1", "", "slo: got None; a section [slo] is required"),
        ("[load]", "[lode]", "unknown parameter; did you mean load?"),
        (
            'lengths = "long"',
            'lengths = "600"',
            "profile: got 512; must have the lengths of the load: up to 600 tokens",
        ),
        ("price = 1.0", "price = 1.0\nbins = [64]", "at most 64 tokens, the longest of the profile's bins"),
    ],
)
def test_a_wrong_case_is_refused_with_its_place(run: Run, before: str, after: str, says: str) -> None:
    assert before in CASE
    status, answer, err = run(CASE.replace(before, after))
    assert (status, answer) == (2, None) and says in err, err


def test_workers_and_their_profiles_are_checked(run: Run, tmp_path: Path) -> None:
    status, _, err = run("workers = 3\n" + CASE.partition("[workers")[0])
    assert status == 2 and "workers: got 3; a table" in err
    wrong = ['{"lengths": 5, "latency_ms": [1]}', '{"lengths": [], "latency_ms": []}', '{"engines": [{"rows": 1}]}']
    for profile in wrong:
        (tmp_path / "profile.json").write_text(profile)
        status, _, err = run(CASE)
        assert status == 2 and "[workers.small]: profile: got" in err, err
