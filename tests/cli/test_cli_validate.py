"""`shapeshift validate` on repositories of models with emulated engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.cli.main import main

UNFIT = """backend: "token_adapt"
parameters [
  { key: "provider" value { string_value: "emulated" } },
  { key: "precision" value { string_value: "f32" } }
]
"""
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
    for name, text in {"forwards": FORWARDS, "unfit": UNFIT, "torn": "backend"}.items():
        (repository / name).mkdir()
        (repository / name / "config.pbtxt").write_text(text)
    assert main(["validate"]) == 1
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.pop("good") == "OK"
    for name, (code, said) in {
        "good_w00": ("INVALID_ARG", "name: got 'good_w00'; another name: "),
        "no_checkpoint": ("NOT_FOUND", "checkpoint: no folder absent"),
        "typo": ("INVALID_ARG", "poolng: got 'poolng'; unknown parameter; did you mean pooling? known: "),
        "dims": ("INVALID_ARG", "output EMBEDDING: got ['TYPE_FP32', 9]; data_type: TYPE_FP32 dims: [ 8 ]"),
        "unfit": ("INVALID_ARG", "precision: got 'precision'; does not go with provider emulated"),
        "forwards": ("NOT_FOUND", "forward_to: no model absent in "),
    }.items():
        assert lines.pop(name).startswith(f"{code}: {repository / name / 'config.pbtxt'}: {said}"), name
    torn = repository / "torn" / "config.pbtxt"
    assert lines.pop("torn") == f"INVALID_ARG: {torn}:1: got 'backend'; '': Expected \":\"."
    assert lines == {}


def test_what_is_no_model_is_called_that(
    repository: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "bare").mkdir()
    assert main(["validate", "bare"]) == 2
    assert "bare has no config.pbtxt, so it is no model" in capsys.readouterr().err
    assert main(["validate", "goood"]) == 2
    assert "; did you mean good? there are: good" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_called_that(
    repository: Path,
    light_checkpoint: Path,
    add_front: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    file: str,
) -> None:
    copy = repository.parent / "pointers"
    shutil.copytree(light_checkpoint, copy)
    (copy / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n")
    add_front(repository, "pointer", checkpoint=copy.resolve())
    assert main(["validate", "pointer"]) == 1
    assert f"{file}'; the file itself: this is a Git LFS pointer; `git lfs pull`" in capsys.readouterr().out


def test_only_the_named_models_are_checked(
    repository: Path, add_front: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    add_front(repository, "bad", checkpoint="absent")
    assert main(["validate", "good"]) == 0
    assert main(["validate", "bad"]) == 1
    assert main(["validate", "other"]) == 2
    assert "no model other in " in capsys.readouterr().err
