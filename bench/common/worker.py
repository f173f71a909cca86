"""A process that measures for a benchmark: a JSON object a line each way, as `bench.peers.protocol.serve` answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.peers.venv import tail
from shapeshift.errors import UnsupportedError

_STOP_S = 10.0
_ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A running command; its standard error goes to `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1"},
                text=True,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return once it serves. Raises UnsupportedError with the end of the log where it ends instead."""
        self._answer()

    def ask(self, **message: object) -> dict[str, Any]:
        """Its answer to a message. Raises UnsupportedError where it ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def memory_mb(self) -> tuple[float, float]:
        """Resident memory of the process now, and the most it had, in MiB."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        now, most = (int(fields[name].split()[0]) / 2**10 for name in ("VmRSS", "VmHWM"))
        return now, most

    def stop(self) -> None:
        """End the process and all that it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise UnsupportedError(f"{self.name} exited with status {code}; {self._log} ends\n{tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer
