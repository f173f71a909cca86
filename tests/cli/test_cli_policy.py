"""`shapeshift policy`: exit status, standard output, standard error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shapeshift.cli import main as cli
from shapeshift.cli import policy as policy_command
from shapeshift.errors import InvalidInputError
from shapeshift.policy_api import Policy, integer

BINS = {"hist": [3, 0, 1], "latency": [1, 2, 3], "k": 2}
BINS_ANSWER = {"edges": [1, 3], "mean_latency": 1.5}
STAIRS = {"lengths": [8, 16, 24], "latency": [1, 1, 2]}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A function that runs the command in this process; returns exit status, standard output, standard error."""

    def call(*arguments: str, given: Any = None) -> tuple[int, str, str]:
        words = ["policy", *arguments]
        if given is not None:
            file = tmp_path / "input.json"
            file.write_bytes(given if isinstance(given, bytes) else json.dumps(given).encode())
            words += ["--input", str(file)]
        status = cli.main(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_an_object_gives_an_object(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("polymorph.bins", given=BINS)
    assert (status, json.loads(out), err) == (0, BINS_ANSWER, "")
    status, out, _ = run("polymorph.staircase", given=STAIRS)
    assert (status, json.loads(out)) == (0, {"edges": [16, 24]})


def test_a_list_gives_a_list(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("polymorph.bins", given=[BINS, BINS | {"k": 1}])
    assert status == 0
    assert json.loads(out) == [BINS_ANSWER, {"edges": [3], "mean_latency": 3.0}]
    assert run("polymorph.bins", given=[])[:2] == (0, "[]\n")


def test_list_names_every_policy_on_a_line_of_its_own(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = run("--list")
    lines = out.splitlines()
    assert status == 0
    assert {"polymorph.bins", "polymorph.staircase"} <= {line.split()[0] for line in lines}
    assert [line.split()[0] for line in lines] == sorted(policy_command.policies())
    assert all(len(line.split()) > 3 for line in lines)


HUGE = 10**400
REFUSED: dict[str, tuple[Any, str]] = {
    "unknown key": (BINS | {"edges": 3}, "edges: got 3; unknown key; known: hist, latency, k"),
    "missing key": ({"hist": [1], "latency": [1]}, "k: got None; this key is required"),
    "bool for a whole number": (BINS | {"k": True}, "k: got True; a whole number at least 1"),
    "bool in a list": (BINS | {"hist": [1, True, 0]}, "hist[1]: got True"),
    "bool for a number": (BINS | {"latency": [1, 2, False]}, "latency[2]: got False; a number at least 0"),
    "float for a whole number": (BINS | {"k": 2.0}, "k: got 2.0"),
    "text": (BINS | {"k": "2"}, "k: got '2'"),
    "null": (BINS | {"hist": None}, "hist: got None; a list of at least 1 values"),
    "no list": (BINS | {"latency": 5}, "latency: got 5"),
    "empty list": (BINS | {"hist": [], "latency": []}, "hist: got []"),
    "below the minimum": (BINS | {"k": 0}, "k: got 0; a whole number at least 1"),
    "negative": (BINS | {"hist": [-1, 0, 1]}, "hist[0]: got -1; a whole number at least 0"),
    "not a number": (b'{"hist": [1], "latency": [NaN], "k": 1}', "latency[0]: got nan"),
    "infinite": (b'{"hist": [1], "latency": [Infinity], "k": 1}', "latency[0]: got inf"),
    "beyond float": (BINS | {"latency": [1, HUGE, 3]}, "latency[1]: got 1000"),
    "counts beyond float": (BINS | {"hist": [1, HUGE, 3]}, "hist"),
    "more digits than are read": (b'{"hist": [1], "latency": [1], "k": ' + b"9" * 5000 + b"}", "input"),
    "lists of two lengths": (BINS | {"latency": [1]}, "latency: got '1 values'; as many as hist has (3)"),
    "all zero": (BINS | {"hist": [0, 0, 0]}, "hist: got [0, 0, 0]; at least one request"),
    "no object": ("bins", "input: got 'bins'; a JSON object"),
    "one bad among many": ([BINS, BINS | {"k": 0}], "k: got 0"),
    "list in a list": ([[BINS]], "input"),
    "a key twice": (b'{"k": 1, "hist": [1], "latency": [1], "k": 2}', "k: got 'k'; each key may appear only once"),
    "not JSON": (b"{", "input: "),
    "empty": (b"", "input: "),
    "deep": (b"[" * 100_000, "input: "),
    "not UTF-8": (b'{"k": "\xff"}', "UTF-8"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_invalid_fields_are_named(run: Callable[..., tuple[int, str, str]], kind: str) -> None:
    given, said = REFUSED[kind]
    status, out, err = run("polymorph.bins", given=given)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("shapeshift policy: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (STAIRS | {"lengths": [8, 8, 24]}, "lengths: got [8, 8, 24]; strictly ascending"),
        (STAIRS | {"lengths": [0, 8, 24]}, "lengths[0]: got 0"),
        (STAIRS | {"latency": [1, 2]}, "latency: got '2 values'; as many as lengths has (3)"),
        (STAIRS | {"tolerance": -0.1}, "tolerance: got -0.1; a number at least 0"),
        (STAIRS | {"tolerance": None}, "tolerance: got None"),
    ],
)
def test_staircase_refuses(run: Callable[..., tuple[int, str, str]], given: Any, said: str) -> None:
    status, out, err = run("polymorph.staircase", given=given)
    assert (status, out) == (2, "") and said in err


def test_unknown_policy_and_unreadable_files(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for arguments, said in (
        (["polymorph.bins", "--input", str(tmp_path / "absent")], "No such file"),
        (["polymorph.bins", "--input", str(tmp_path)], "Is a directory"),
        (["polymorph.bins"], "NAME --input FILE, or --list"),
        ([], "NAME --input FILE, or --list"),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and said in err
    status, out, err = run("polymorph.guess", given=BINS)
    assert (status, out) == (2, "") and "no 'polymorph.guess'; known: " in err and "polymorph.bins" in err


def test_the_algorithm_is_always_in_the_answer() -> None:
    pick = Policy("t.pick", "picks", lambda n, algorithm: {"n": n, "by": algorithm}, {"n": integer()}, ("best", "fair"))
    assert pick.evaluate({"n": 1}) == {"n": 1, "by": "best", "algorithm": "best"}
    assert pick.evaluate({"n": 1, "algorithm": "fair"})["algorithm"] == "fair"
    with pytest.raises(InvalidInputError, match="algorithm: got 'worst'; one of best, fair"):
        pick.evaluate({"n": 1, "algorithm": "worst"})


def test_exit_status() -> None:
    def call(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shapeshift.cli.main", *words]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)

    good = call("policy", "polymorph.bins", "--input", "-", given=json.dumps(BINS))
    assert (good.returncode, json.loads(good.stdout), good.stderr) == (0, BINS_ANSWER, "")
    bad = call("policy", "polymorph.bins", "--input", "-", given=json.dumps(BINS | {"k": 0}))
    assert (bad.returncode, bad.stdout) == (2, "") and "k: got 0" in bad.stderr


@pytest.mark.parametrize("words", [["policy", "--nonsense"], ["nonsense"], []])
def test_invalid_arguments_exit_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""
