"""Runs the real perf_analyzer and reads what it recorded of each request.

Its own table counts the time until it next looks at its workers as measured time, which understates the
throughput of short runs; here figures come from the request time stamps that it exports.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import NotFoundError, ShapeshiftError

FOLDER = Path("build/perf_analyzer")
_TRIES = 3


@dataclass(frozen=True)
class Measured:
    """A closed loop's figures: answers a second, and the latency of each request in milliseconds."""

    per_second: float
    latency_ms: NDArray[np.float64]


def measure(
    url: str,
    model: str,
    texts: Sequence[str],
    concurrency: int,
    count: int,
    folder: Path = FOLDER,
    patience_s: float | None = None,
) -> Measured:
    """Send `count` texts (in turn) from `concurrency` closed loops over gRPC, after a warm-up of a tenth.

    perf_analyzer sometimes sleeps for ever once all its requests are answered (seen on a busy machine): a run
    that takes longer than `patience_s`, if given, is ended and begun again, twice at most.
    Raises NotFoundError where perf_analyzer was not unpacked, ShapeshiftError with its words where it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "texts.json"
        data.write_text(json.dumps({"data": [{"TEXT": [text]} for text in texts]}))
        warm_up = max(concurrency * 2, count // 10)
        _run(folder, url, model, data, concurrency, warm_up, Path(scratch) / "warm.json", patience_s)
        export = Path(scratch) / "profile.json"
        _run(folder, url, model, data, concurrency, count, export, patience_s)
        return _read(export)


def _run(
    folder: Path,
    url: str,
    model: str,
    data: Path,
    concurrency: int,
    count: int,
    export: Path,
    patience_s: float | None,
) -> None:
    program = folder / "perf_analyzer"
    if not program.is_file():
        raise NotFoundError(f"no perf_analyzer at {program}; run `make setup`")
    command = [str(program), "-m", model, "-u", url, "-i", "grpc", "--input-data", str(data)]
    command += ["--concurrency-range", str(concurrency), "--request-count", str(count)]
    command += ["--profile-export-file", str(export)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
    done = _patiently(command, environment, patience_s)
    if done.returncode or not export.is_file():
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ShapeshiftError(f"perf_analyzer failed on model {model} at {url}: {' '.join(lines[-3:])}")


def _patiently(
    command: list[str], environment: dict[str, str], patience_s: float | None
) -> subprocess.CompletedProcess[str]:
    for _ in range(_TRIES):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=patience_s
            )
    raise ShapeshiftError(f"perf_analyzer did not end within {patience_s:g} s, {_TRIES} times in a row")


def _read(export: Path) -> Measured:
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    starts = np.array([request["timestamp"] for request in requests], dtype=np.float64)
    ends = np.array([request["response_timestamps"][-1] for request in requests], dtype=np.float64)
    elapsed_s = (ends.max() - starts.min()) / 1e9
    return Measured(len(requests) / elapsed_s, (ends - starts) / 1e6)
