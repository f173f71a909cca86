"""`shapeshift validate` on repositories of models with emulated engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.cli.main import main

FORWARDS = 'backend: "fused_decode"\nparameters { key: "forward_to" value { string_value: "absent" } }\n'


@pytest.fixture
def repository(tmp_path: Path, add_front: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one model that can be built, in the working directory."""
    monkeypatch.chdir(tmp_path)
    add_front(tmp_path / "model_repository", "good")
    return Path("model_repository")


def test_a_good_repository_is_ok_and_nothing_is_built(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate"]) == 0
    assert capsys.readouterr().out == "good: OK\n"
    assert [path.name for path in Path().iterdir()] == ["model_repository"]


def test_each_broken_model_gets_a_line(
    repository: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    add_front(repository, "good_w00")
    add_front(repository, "no_checkpoint", checkpoint="absent")
    add_front(repository, "typo", poolng="mean")
    dims = add_front(repository, "dims") / "config.pbtxt"
    dims.write_text(dims.read_text().replace("dims: [ 8 ]", "dims: [ 9 ]"))
    for name, text in {"forwards": FORWARDS, "torn": "backend"}.items():
        (repository / name).mkdir()
        (repository / name / "config.pbtxt").write_text(text)
    assert main(["validate"]) == 1
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.pop("good") == "OK"
    for name, (code, said) in {
        "good_w00": ("INVALID_ARG", "name: got 'good_w00'; another name: "),
        "no_checkpoint": ("NOT_FOUND", "checkpoint: no folder absent"),
        "typo": ("INVALID_ARG", "poolng: got 'poolng'; unknown parameter; known: "),
        "dims": ("INVALID_ARG", "output EMBEDDING: got ['TYPE_FP32', 9]; data_type: TYPE_FP32 dims: [ 8 ]"),
        "forwards": ("NOT_FOUND", "forward_to: no model absent in "),
        "torn": ("INTERNAL", ""),
    }.items():
        assert lines.pop(name).startswith(f"{code}: {repository / name / 'config.pbtxt'}: {said}"), name
    assert lines == {}


def test_only_the_named_models_are_checked(
    repository: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    add_front(repository, "bad", checkpoint="absent")
    assert main(["validate", "good"]) == 0
    assert main(["validate", "bad"]) == 1
    assert main(["validate", "other"]) == 2
    assert "no model other in " in capsys.readouterr().err
