"""Scenarios as users write them: what they give, and what is said of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from tests.simulate.scenarios import ADAPTERS, IMAGES, PROFILE, TEXTS


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `shapeshift simulate` on a text; returns the status, standard output and standard error."""
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    (tmp_path / "images.json").write_text(json.dumps(IMAGES[1]))
    (tmp_path / "lengths.csv").write_text("at_s,length,output_length\n0,40,10\n1,100,20\n")

    def call(scenario: str, *arguments: str) -> tuple[int, str, str]:
        (tmp_path / "scenario.toml").write_text(scenario)
        status = main(["simulate", str(tmp_path / "scenario.toml"), *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


Run = Callable[..., tuple[int, str, str]]


def test_a_scenario_of_texts_gives_a_row_for_each_system_and_the_plans(run: Run) -> None:
    status, out, _ = run(TEXTS)
    lines = out.splitlines()
    assert status == 0
    assert [line.split("  ")[1] for line in lines[2:4]] == ["as stated", "paper"]
    assert any(line.startswith("  paper, 0 s: no traffic yet") for line in lines)
    again = run(TEXTS)[1]
    assert again == out
    assert run(TEXTS, "--seed", "9")[1] != out


def test_json_holds_what_the_table_shows(run: Run) -> None:
    status, out, _ = run(TEXTS, "--json")
    outcomes = json.loads(out)
    assert status == 0
    assert outcomes["as stated"]["requests"] == outcomes["paper"]["requests"] > 500
    assert 0 < outcomes["as stated"]["in time"] <= 1
    assert outcomes["as stated"]["plans"][0]["at_s"] == 0


def test_images_and_adapters_are_simulated_too(run: Run) -> None:
    outcomes = json.loads(run(IMAGES[0], "--json")[1])
    assert outcomes["as stated"]["utility"] > outcomes["plain"]["utility"] > 0
    outcomes = json.loads(run(ADAPTERS, "--json")[1])
    assert outcomes["as stated"]["hit ratio"] > outcomes["no cache"]["hit ratio"]
    assert outcomes["as stated"]["first p98 ms"] > 0


def test_a_trace_takes_the_place_of_the_load(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("at_s,length,latency_ms\n0,40,1\n1,40,1000\n2,400,1000\n")
    outcomes = json.loads(run(TEXTS, "--json", "--trace", str(file))[1])
    assert outcomes["as stated"]["requests"] == 3
    assert outcomes["as stated"]["in time"] == pytest.approx(2 / 3)


def test_the_plot_names_every_system(run: Run, tmp_path: Path) -> None:
    assert run(TEXTS, "--plot", str(tmp_path / "plot.html"))[0] == 0
    drawn = (tmp_path / "plot.html").read_text()
    assert "<svg" in drawn and "as stated" in drawn and "paper" in drawn
    status, _, err = run(TEXTS, "--plot", str(tmp_path / "absent" / "plot.html"))
    assert status == 2 and "absent/plot.html cannot be written" in err


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "dispatch =",
            "dispach =",
            "[compare.paper]: dispach: got 'dispach'; unknown parameter; did you mean dispatch?",
        ),
        ("slo_ms = 400", "slo_m = 400", "[polymorph]: slo_m: got 'slo_m'; unknown parameter; did you mean slo_ms?"),
        ("[sidecar]", "[sidcar]", "sidcar: got 'sidcar'; unknown parameter; did you mean sidecar?"),
        ("plan_period_s", "plan_perod_s", "[sidecar]: plan_perod_s"),
        ("rate = 40", "rat = 40", "[load]: rat: got 'rat'; unknown parameter; did you mean rate?"),
        ("rate = 40", "rate = -1", "rate: got -1.0; must be above 0"),
        ("seed = 3", "seed = -3", "seed: got -3; a whole number of at least 0"),
        ("[polymorph]", "[polymorf]", "unknown parameter; did you mean polymorph?"),
        ("workers = 8", "workers = 0", "[polymorph]: workers: got 0; must be at least 1"),
        ("workers = 8", "workers = 'many'", "[polymorph]: workers: got 'many'; must be a whole number"),
        ("bins = [64, 512]", "bins = [512, 64]", "[polymorph]: bins: got '512,64'; whole numbers of tokens, ascending"),
        (
            "bins = [64, 512]",
            "bins = [64, 600]",
            "bins: got 600; must be at most the longest length of the profile, 512",
        ),
        ("bins = [64, 512]", "bins = [64, 128]", "length of request"),
        ('profile = "profile.json"', "", "profile: got None; this parameter is required"),
        ('profile = "profile.json"', 'profile = "none.json"', "must be a readable JSON file"),
        ("multilevel", "best", "dispatch: got 'best'; one of earliest_finish"),
        ("rate = 40", "rate == 40", "scenario.toml: "),
    ],
)
def test_a_wrong_scenario_is_refused_with_its_place(run: Run, before: str, after: str, says: str) -> None:
    assert before in TEXTS
    status, out, err = run(TEXTS.replace(before, after))
    assert (status, out) == (2, "")
    assert says in err


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ({"lengths": [8, 512]}, "must hold {lengths, latency_ms}"),
        ({"lengths": [8, 512], "latency_ms": [1]}, "one of latency_ms for each"),
        ({"lengths": [512, 8], "latency_ms": [1, 2]}, "ascending lengths"),
        ({"lengths": [8, 512], "latency_ms": [0, 2]}, "must be above 0 ms"),
        ({"lengths": [8, 512], "latency_ms": ["x", 2]}, "must hold {lengths, latency_ms}"),
        (
            {"engines": [{"tokens": 64, "rows": 1, "latency": [[64, 1, 1, 1]]}]},
            "bins: got 512; must be a length of the",
        ),
    ],
)
def test_a_wrong_profile_is_refused(run: Run, tmp_path: Path, profile: object, says: str) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    status, _, err = run(TEXTS)
    assert status == 2 and "[polymorph]" in err and says in err


def test_a_generated_config_brings_its_own_profile_and_parameters(
    run: Run, tmp_path: Path, add_front: Callable[..., Path], build_fronts: Callable[[Path, Path], Path]
) -> None:
    stated = {"bins": "16,64", "placement": "partitioned", "slo_ms": 200, "workers": 3}
    add_front(tmp_path / "model_repository", "front", **stated)
    config = build_fronts(tmp_path / "model_repository", tmp_path / "build") / "front" / "config.pbtxt"
    load = "[load]\nrate = 20\nlengths = '30'\n"
    outcomes = json.loads(run(f"{load}[polymorph]\nprofile = '{config}'\n", "--json")[1])
    assert outcomes["as stated"]["workers"] == 3.0 and outcomes["as stated"]["served"] == 1.0
    assert "64: 100%" in outcomes["as stated"]["plans"][0]["why"]


def test_a_system_must_be_able_to_serve_the_trace(run: Run, tmp_path: Path) -> None:
    for scenario, before, after, says in (
        (IMAGES[0], "otas = true", "latency_ms = 500\n[compare.x]\ntask = 'cat'", "task: got ''; one of CIFAR10"),
        (IMAGES[0], "otas = true", "", "latency_ms: got 0; above 0 of each request"),
        (ADAPTERS, "lengths =", "# lengths =", "output_length: got 0; at least 1 of each request"),
        (ADAPTERS, "pool_bytes = 40000000", "pool_bytes = 4000", "pool_bytes: got 4000; at least"),
        (ADAPTERS, "slots = 8", "slots = 0", "slots: got 0; above 0"),
        (ADAPTERS, 'predictor = "mean"', 'predictor = "oracle:7"', "predictor: got 'oracle:7'; mean, or oracle:"),
    ):
        assert before in scenario
        status, _, err = run(scenario.replace(before, after))
        assert status == 2 and says in err, err
