"""What set-up refuses before it installs anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shapeshift.cli.main import main

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("my projects", "has a space, and Triton's Python backend starts no model from such a path: {folder};"),
        ("project", "MODELS: no model caht in model_repository; there are: chat encode"),
    ],
)
def test_make_setup_refuses_a_space_in_the_path_and_a_model_that_is_not_there(
    place: str, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / place
    for model in ("chat", "encode"):
        (folder / "model_repository" / model).mkdir(parents=True)
        (folder / "model_repository" / model / "config.pbtxt").touch()
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(PROJECT / name, folder)
    shutil.copytree(PROJECT / "requirements", folder / "requirements")
    command = ["make", "setup", "PYTHON=false", "MODELS=chat,caht"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert said.format(folder=folder) in done.stdout
    assert not (folder / "build").exists() and not (folder / ".venv").exists()


def test_shapeshift_setup_refuses_a_space_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = tmp_path / "my projects" / "build"
    assert main(["setup", "--build", str(build)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shapeshift setup: build: got ") and "a path without spaces" in said
    assert not build.exists()
