"""Starts a program that outlives whoever asks for it: `python -m shapeshift.fleet.supervision.launch LOG COMMAND...`.

The program gets a session of its own, and no parent that could end it: this process ends at once. It writes the pid.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Start COMMAND with its output in LOG, and write its pid to standard output; returns 1 where it does not start."""
    log, *command = arguments
    try:
        with Path(log).open("ab") as stream:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{process.pid}\n")
    # It is not waited for: the kernel gives it another parent.
    process.returncode = 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
