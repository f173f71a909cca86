"""The limits of what the files of a task may say, by the field that breaks them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.tasks import folder

STATED: dict[str, Any] = {"name": "digits", "labels": ["one", "two"], "latency_ms": 250, "utility": 0.5}
MOST = folder._MAX_LABELS


def test_what_a_task_states_is_read_with_its_units() -> None:
    assert folder.check(STATED) == ("digits", ("one", "two"), 250.0, 0.5)


@pytest.mark.parametrize("name", ["a", "a" * 64, "a-b_c9"])
def test_names_within_the_limits_are_taken(name: str) -> None:
    assert folder.check({**STATED, "name": name})[0] == name


@pytest.mark.parametrize("name", ["", "a" * 65, "a/b", "a b", "-", "_", None, 1, ["a"]])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^task.json: name: got .*; up to 64 letters, digits, - and _$"):
        folder.check({**STATED, "name": name})


@pytest.mark.parametrize("count", [2, MOST])
def test_numbers_of_labels_within_the_limits_are_taken(count: int) -> None:
    assert len(folder.check({**STATED, "labels": [str(one) for one in range(count)]})[1]) == count


@pytest.mark.parametrize(
    "labels",
    [["a"], [str(one) for one in range(MOST + 1)], ["a", "a"], ["a", 1], "ab", None, {"a": 1, "b": 2}],
    ids=lambda labels: str(labels)[:12],
)
def test_other_labels_are_refused(labels: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"^task.json: labels: got .*; 2 to {MOST} different strings$"):
        folder.check({**STATED, "labels": labels})


@pytest.mark.parametrize(("name", "value"), [("latency_ms", 1e-6), ("utility", 0), ("utility", 0.0), ("utility", 7)])
def test_numbers_within_the_limits_are_taken(name: str, value: float) -> None:
    assert folder.check({**STATED, name: value})[2 if name == "latency_ms" else 3] == float(value)


@pytest.mark.parametrize("name", ["latency_ms", "utility"])
@pytest.mark.parametrize("value", [-1e-6, float("inf"), float("nan"), True, "1", None])
def test_other_numbers_are_refused(name: str, value: Any) -> None:
    limit = "above 0" if name == "latency_ms" else "a finite number, 0 or more"
    with pytest.raises(InvalidInputError, match=f"^task.json: {name}: got {re.escape(repr(value))}; {limit}$"):
        folder.check({**STATED, name: value})


def test_a_task_must_be_answered_in_some_time() -> None:
    with pytest.raises(InvalidInputError, match="^task.json: latency_ms: got 0; above 0$"):
        folder.check({**STATED, "latency_ms": 0})


@pytest.mark.parametrize("share", [0, 0.0, 0.5, 1, 1.0])
def test_shares_are_taken_from_none_to_all(tmp_path: Path, share: float) -> None:
    (tmp_path / folder.PROFILE_FILE).write_text(json.dumps({"accuracy": {"0": share, "2": 0.5, "9": "unused"}}))
    assert folder.read_accuracy(tmp_path, (0, 2)) == {0: float(share), 2: 0.5}


@pytest.mark.parametrize("accuracy", [{"0": -0.01}, {"0": 1.01}, {"0": True}, {"0": "0.5"}, {"2": 0.5}, [0.5], None])
def test_other_shares_are_refused(tmp_path: Path, accuracy: Any) -> None:
    (tmp_path / folder.PROFILE_FILE).write_text(json.dumps({"accuracy": accuracy}))
    with pytest.raises(InvalidInputError, match=r"^profile.json: accuracy of gamma 0: got .*; a number from 0 to 1"):
        folder.read_accuracy(tmp_path, (0,))


@pytest.mark.parametrize("missing", folder.FILES)
def test_a_hash_is_of_all_files_and_names_the_one_that_is_missing(tmp_path: Path, missing: str) -> None:
    for name in folder.FILES:
        (tmp_path / name).write_text("a")
    before = folder.sha256(tmp_path)
    (tmp_path / missing).write_text("b")
    assert folder.sha256(tmp_path) != before
    (tmp_path / missing).write_text("a")
    assert folder.sha256(tmp_path) == before
    (tmp_path / missing).unlink()
    with pytest.raises(InvalidInputError, match=rf"^task folder: got .*; a folder that contains {missing}$"):
        folder.sha256(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "a readable file (No such file"), ("{", "JSON ("), ("[1]", "a JSON object")]
)
def test_a_file_without_an_object_is_refused_by_its_name(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "task.json").write_text(text)
    with pytest.raises(InvalidInputError, match=rf"^task.json: got .*; {re.escape(message)}"):
        folder.read_object(tmp_path / "task.json")
