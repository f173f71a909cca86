"""Set-up in a folder whose path has a space."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shapeshift.cli.main import main

PROJECT = Path(__file__).resolve().parents[2]


def test_make_setup_refuses_it_before_it_installs_anything(tmp_path: Path) -> None:
    folder = tmp_path / "my projects"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(PROJECT / name, folder)
    shutil.copytree(PROJECT / "requirements", folder / "requirements")
    command = ["make", "setup", "PYTHON=false"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"has a space, and Triton's Python backend starts no model from such a path: {folder};" in done.stdout
    assert not (folder / "build").exists() and not (folder / ".venv").exists()


def test_shapeshift_setup_refuses_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = tmp_path / "my projects" / "build"
    assert main(["setup", "--build", str(build)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shapeshift setup: build: got ") and "a path without spaces" in said
    assert not build.exists()
