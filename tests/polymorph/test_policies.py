"""The JSON face of the technique's policies: answers, and what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shapeshift.cli.main import main
from shapeshift.cli.policy import evaluate
from shapeshift.errors import InvalidInputError

ALLOCATE: dict[str, Any] = {
    "gpus": 5,
    "demand": [30, 11.5],
    "capacity": [10, 5],
    "latency": [{"kind": "affine", "l": 1.5}, {"kind": "md1", "l": 3, "m": 5}],
}
DISPATCH: dict[str, Any] = {
    "length": 10,
    "levels": [
        {"max_length": 64, "service_ms": 2, "instances": [{"id": 1, "outstanding": 3, "capacity": 8}]},
        {"max_length": 128, "service_ms": 3, "instances": [{"id": 2, "outstanding": 1, "capacity": 8}]},
    ],
}
REPLACE: dict[str, Any] = {"have": [64, 64, 128], "want": [1, 2], "edges": [64, 128]}
AUTOSCALE: dict[str, Any] = {
    "p98_ms": 10,
    "slo_ms": 100,
    "below_since_s": 90,
    "workers": 3,
    "max_workers": 4,
    "outstanding": [2, 0, 1],
}
SOUND = {
    "polymorph.allocate": ALLOCATE,
    "polymorph.dispatch": DISPATCH,
    "polymorph.replace": REPLACE,
    "polymorph.autoscale": AUTOSCALE,
}


def test_only_an_allocation_waits_for_the_compiler() -> None:
    code = "import sys; from shapeshift.polymorph.policy import api; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_allocate() -> None:
    given = evaluate("polymorph.allocate", ALLOCATE)
    assert list(given) == ["counts", "objective", "feasible", "solve_ms", "algorithm"]
    assert given["algorithm"] == "exact"
    assert given["counts"] == [3, 2]
    assert given["feasible"] is True
    assert given["objective"] == pytest.approx(30 * 1.5 * 5.5 + 11.5 * (3 * (1 + 0.98 / 0.04) + 3000 * (1.15 - 0.98)))
    even = evaluate("polymorph.allocate", ALLOCATE | {"algorithm": "even", "cap_last": True})
    assert (even["counts"], even["feasible"], even["algorithm"]) == ([2, 3], False, "even")


def test_dispatch() -> None:
    assert evaluate("polymorph.dispatch", DISPATCH) == {"level": 1, "instance": 2, "algorithm": "earliest_finish"}
    chosen = evaluate("polymorph.dispatch", DISPATCH | {"algorithm": "multilevel", "threshold": 0.375})
    assert chosen == {"level": 1, "instance": 2, "algorithm": "multilevel"}
    none = {"level": None, "instance": None, "algorithm": "intra_group"}
    assert evaluate("polymorph.dispatch", DISPATCH | {"length": 129, "algorithm": "intra_group"}) == none
    assert evaluate("polymorph.dispatch", {"length": 1, "levels": [], "algorithm": "intra_group"}) == none


def test_service_times_are_optional_where_they_are_not_used() -> None:
    levels = copy.deepcopy(DISPATCH["levels"])
    del levels[0]["service_ms"]
    levels[1]["service_ms"] = None
    given = {"length": 10, "levels": levels, "algorithm": "inter_group"}
    assert evaluate("polymorph.dispatch", given)["level"] == 1
    with pytest.raises(InvalidInputError, match=r"^levels\[0\].service_ms"):
        evaluate("polymorph.dispatch", given | {"algorithm": "earliest_finish"})


def test_replace_and_autoscale() -> None:
    assert evaluate("polymorph.replace", REPLACE) == {"changes": [[1, 128]]}
    assert evaluate("polymorph.autoscale", AUTOSCALE) == {"action": "in", "worker": 1}
    assert evaluate("polymorph.autoscale", AUTOSCALE | {"min_workers": 3}) == {"action": "keep", "worker": None}
    assert evaluate("polymorph.autoscale", AUTOSCALE | {"p98_ms": 95}) == {"action": "out", "worker": None}


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("allocate", {"gpus": 0}, "gpus"),
        ("allocate", {"gpus": 5.0}, "gpus"),
        ("allocate", {"gpus": True}, "gpus"),
        ("allocate", {"capacity": [10, 0.5]}, "capacity[1]"),
        ("allocate", {"capacity": [10]}, "capacity"),
        ("allocate", {"latency": ALLOCATE["latency"][:1]}, "latency"),
        ("allocate", {"demand": [1, -1]}, "demand[1]"),
        ("allocate", {"demand": [1, "2"]}, "demand[1]"),
        ("allocate", {"demand": []}, "demand"),
        ("allocate", {"latency": [{"kind": "linear", "l": 1}] * 2}, "latency[0].kind"),
        ("allocate", {"latency": [{"kind": ["affine"], "l": 1}] * 2}, "latency[0].kind"),
        ("allocate", {"latency": [{"l": 1}] * 2}, "latency[0]"),
        ("allocate", {"latency": [3, 4]}, "latency[0]"),
        ("allocate", {"latency": [{"kind": "affine", "l": 0}] * 2}, "latency[0].l"),
        ("allocate", {"latency": [{"kind": "affine", "l": 1, "m": 2}] * 2}, "latency[0].m"),
        ("allocate", {"latency": [{"kind": "md1", "l": 1}] * 2}, "latency[0].m"),
        ("allocate", {"latency": [{"kind": "table", "y": []}] * 2}, "latency[0].y"),
        ("allocate", {"latency": [{"kind": "table", "y": [1, None]}] * 2}, "latency[0].y[1]"),
        ("allocate", {"cap_last": 1}, "cap_last"),
        ("allocate", {"algorithm": "best"}, "algorithm"),
        ("allocate", {"slo": 3}, "slo"),
        ("dispatch", {"length": 0}, "length"),
        ("dispatch", {"length": "10"}, "length"),
        ("dispatch", {"levels": DISPATCH["levels"][::-1]}, "levels"),
        ("dispatch", {"levels": DISPATCH["levels"][:1] * 2}, "levels"),
        ("dispatch", {"levels": [{"max_length": 64}]}, "levels[0].instances"),
        ("dispatch", {"levels": [7]}, "levels[0]"),
        ("dispatch", {"levels": [DISPATCH["levels"][0] | {"load": 1}]}, "levels[0].load"),
        ("dispatch", {"levels": [DISPATCH["levels"][0] | {"service_ms": 0}]}, "levels[0].service_ms"),
        ("dispatch", {"threshold": -0.1}, "threshold"),
        ("dispatch", {"decay": None}, "decay"),
        ("dispatch", {"peek": 0}, "peek"),
        ("dispatch", {"peek": 1.5}, "peek"),
        ("replace", {"have": [64, 64, 100]}, "have[2]"),
        ("replace", {"want": [1, 1]}, "want"),
        ("replace", {"want": [1, 1, 1]}, "want"),
        ("replace", {"edges": [128, 64]}, "edges"),
        ("autoscale", {"workers": 2}, "outstanding"),
        ("autoscale", {"slo_ms": 0}, "slo_ms"),
        ("autoscale", {"min_workers": 0}, "min_workers"),
        ("autoscale", {"min_workers": 5}, "max_workers"),
        ("autoscale", {"outstanding": [0, -1, 0]}, "outstanding[1]"),
        ("autoscale", {"p98_ms": float("nan")}, "p98_ms"),
    ],
)
def test_invalid_input_is_refused(name: str, change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        evaluate(f"polymorph.{name}", SOUND[f"polymorph.{name}"] | change)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": "a"}, "levels"),
        ({"id": 2}, "levels"),
        ({"id": 1.5}, "levels[0].instances[0].id"),
        ({"id": True}, "levels[0].instances[0].id"),
        ({"outstanding": 10**400}, "levels[0].instances[0].outstanding"),
        ({"outstanding": -1}, "levels[0].instances[0].outstanding"),
        ({"capacity": 0}, "levels[0].instances[0].capacity"),
        ({"busy": 1}, "levels[0].instances[0].busy"),
    ],
)
def test_instances_are_checked(change: dict[str, Any], field: str) -> None:
    levels = copy.deepcopy(DISPATCH["levels"])
    levels[0]["instances"][0] |= change
    with pytest.raises(InvalidInputError) as refused:
        evaluate("polymorph.dispatch", DISPATCH | {"levels": levels})
    assert refused.value.field == field


@pytest.mark.parametrize("name", SOUND)
def test_every_key_without_a_default_is_required(name: str) -> None:
    for key in SOUND[name]:
        with pytest.raises(InvalidInputError, match=f"^{key}: .*required"):
            evaluate(name, {other: value for other, value in SOUND[name].items() if other != key})


@pytest.mark.parametrize("name", SOUND)
def test_from_the_command_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input.json"
    file.write_text(json.dumps([SOUND[name], SOUND[name]]))
    assert main(["policy", name, "--input", str(file)]) == 0
    given = json.loads(capsys.readouterr().out)
    assert len(given) == 2
    file.write_text(json.dumps(SOUND[name] | {"surplus": 1}))
    assert main(["policy", name, "--input", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "surplus" in said.err
