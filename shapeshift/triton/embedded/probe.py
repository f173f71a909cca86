"""The options that a tritonserver binary supports, so that one command line works with old and new releases."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from shapeshift.errors import NotFoundError, UnsupportedError

_OPTION = re.compile(r"^\s+--([a-z][a-z0-9-]*)", re.MULTILINE)


def parse_help(text: str) -> frozenset[str]:
    """The option names, without dashes, that a `tritonserver --help` lists."""
    return frozenset(_OPTION.findall(text))


def supported_options(binary: Path, environment: Mapping[str, str], timeout_s: float = 120.0) -> frozenset[str]:
    """The options of `binary`. Raises NotFoundError if it is missing, UnsupportedError if it does not run."""
    if not binary.is_file():
        raise NotFoundError(f"no server at {binary}; run `shapeshift setup`")
    try:
        answer = subprocess.run(
            [binary, "--help"],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"{binary} does not run here ({error}); run `shapeshift setup` again") from error
    options = parse_help(answer.stdout + answer.stderr)
    if not options:
        lines = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        raise UnsupportedError(f"{binary} does not run here ({lines[-1]}); it requires x86_64 and glibc 2.35")
    return options
