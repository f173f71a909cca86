"""Scenarios as users write them: what they give, and what is said of a wrong one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from tests.simulate.scenarios import ADAPTERS, CASCADE, DECODE, IMAGES, PROFILE, TEXTS

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `shapeshift simulate` on a text; returns the status, standard output and standard error."""
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    (tmp_path / "images.json").write_text(json.dumps(IMAGES[1]))
    (table,) = (PROJECT / "checkpoints/text-classifiers/candidates").glob("clinc150-*.json")
    (tmp_path / "table.json").write_text(table.read_text())
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


def test_generators_and_cascades_are_simulated_too(run: Run) -> None:
    outcomes = json.loads(run(DECODE, "--json")[1])
    assert outcomes["as stated"]["first mean ms"] < outcomes["window"]["first mean ms"]
    outcomes = json.loads(run(CASCADE, "--json")[1])
    assert outcomes["as stated"]["by level 2"] > outcomes["cut"]["by level 2"] > 0
    assert outcomes["dead"]["fell back"] > outcomes["as stated"]["fell back"] == 0


@pytest.mark.parametrize("scenario", [TEXTS, IMAGES[0], DECODE, CASCADE, ADAPTERS])
def test_what_is_beside_wait_and_engine_comes_on_top(run: Run, scenario: str) -> None:
    near, *_, far = json.loads(run(f"{scenario}[compare.far]\noverhead_ms = 9\n", "--json")[1]).values()
    figures = [name for name in near if name.endswith("mean ms")]
    assert figures and [far[name] - near[name] for name in figures] == pytest.approx([9.0] * len(figures))


@pytest.mark.parametrize(
    ("scenario", "before", "after", "says"),
    [
        (DECODE, "slots = 8", "slots = 0", "[fused_decode]: slots: got 0; above 0"),
        (DECODE, '"window"', '"windows"', "[compare.window]: batching: got 'windows'; one of fused, window, instances"),
        (DECODE, 'lengths = "lengths.csv"', "", "output_length: got 0; at least 1 of each request"),
        (CASCADE, '"cut"', '"cuts"', "[compare.cut]: routing: got 'cuts'; one of sigmoid, cut"),
        (CASCADE, "table.json", "none.json", "[cascade]: candidate table: got"),
    ],
)
def test_wrong_generators_and_cascades_are_refused(run: Run, scenario: str, before: str, after: str, says: str) -> None:
    status, _, err = run(scenario.replace(before, after))
    assert status == 2 and says in err


def test_a_front_may_have_more_workers_than_a_server(run: Run) -> None:
    status, out, _ = run(TEXTS.replace("workers = 8", "workers = 1000"), "--json")
    assert status == 0 and json.loads(out)["as stated"]["workers"] == 1000


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
        ("workers = 8", "workers = 10001", "[polymorph]: workers: got 10001; at most 10000"),
        ("workers = 8", "workers = 300\nmax_workers = 400", "max_workers: got '400'; left out: more than 256"),
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
        ("rate = 40", "rate = 1e12", "[load]: rate: got 1000000000000.0; must give at most"),
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
        ({"engines": []}, "must hold {lengths, latency_ms}"),
        ({"engines": [{"tokens": None, "rows": None, "latency": []}]}, "must hold {lengths, latency_ms}"),
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


@pytest.mark.parametrize("stated", ["{", '{"engines": [{"rows": 1}]}'])
def test_a_config_with_a_wrong_profile_is_refused(run: Run, tmp_path: Path, stated: str) -> None:
    text = stated.replace('"', '\\"')
    value = f'parameters {{ key: "profile" value {{ string_value: "{text}" }} }}'
    (tmp_path / "config.pbtxt").write_text(f'name: "front" {value}')
    status, _, err = run(TEXTS.replace("bins = [64, 512]\n", "").replace("profile.json", "config.pbtxt"))
    assert status == 2 and "[polymorph]: profile: got" in err


def test_a_negative_seed_is_refused(run: Run) -> None:
    status, _, err = run(TEXTS, "--seed", "-1")
    assert status == 2 and "seed: got -1; a whole number of at least 0" in err


def test_a_load_that_is_worth_nothing_has_a_utility_of_0(run: Run, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("at_s,length,utility\n0,40,0\n1,40,0\n")
    assert json.loads(run(TEXTS, "--json", "--trace", str(tmp_path / "trace.csv"))[1])["as stated"]["utility"] == 0.0


def test_a_worker_cannot_die_where_none_is_left(run: Run) -> None:
    status, out, _ = run(TEXTS.replace("plan_period_s = 5", "leave_s = 5\nkill_s = 10"), "--json")
    assert status == 0 and json.loads(out)["as stated"]["unserved"] > 0.5


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
        (ADAPTERS, "adapters = 20", "adapters = 4", "adapters: got 4; must be 0, or 5 or more"),
        (ADAPTERS, "rank_bytes = 10000", "rank_bytes = 0", "rank_bytes: got 0; above 0"),
        (ADAPTERS, "base_s = 0.002", "base_s = inf", "base_s: got inf; 0 or more"),
        (ADAPTERS, "rank_bytes", "slot_tokens = 100000\nrank_bytes", "pool_bytes: got 40000000; at least 101280000"),
        (ADAPTERS, "rank_bytes", "adapter_mb = 1\nrank_bytes", "adapter_mb: got 1; at least 2, the largest adapter"),
        (ADAPTERS, "rank_bytes", "loaded = ['x']\nrank_bytes", "loaded: got 'x'; names that begin with their rank"),
        (IMAGES[0], '"-8" = 0.9', '"-8" = 9', "tasks.EuroSAT.-8: got 9; an accuracy, 0 to 1"),
        (ADAPTERS, 'predictor = "mean"', 'predictor = "oracle:7"', "predictor: got 'oracle:7'; mean, or oracle:"),
    ):
        assert before in scenario
        status, _, err = run(scenario.replace(before, after))
        assert status == 2 and says in err, err
