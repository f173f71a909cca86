"""Runs perf_analyzer and reads its records of the requests.

Its own table counts the time until its next poll of the workers as measured time, which understates the throughput of
short runs. Here all figures come from the request time stamps that it exports.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import NotFoundError, ShapeshiftError

FOLDER = Path("build/perf_analyzer")
_TRIES = 3


@dataclass(frozen=True)
class ClosedLoopResult:
    """Answers a second of a closed loop, and the milliseconds until the last and the first response of each request."""

    per_second: float
    latency_ms: NDArray[np.float64]
    first_ms: NDArray[np.float64]


def measure(
    url: str,
    model: str,
    inputs: Sequence[Mapping[str, Any]],
    concurrency: int,
    count: int,
    folder: Path = FOLDER,
    timeout_s: float | None = None,
    streaming: bool = False,
) -> ClosedLoopResult:
    """Send `count` requests from `concurrency` closed loops over gRPC, after a warm-up of a tenth.

    inputs: sent in turn, as `load_inputs.Entry` says; streaming: whether the model is decoupled.

    perf_analyzer sometimes sleeps forever after all its requests are answered (seen on a busy machine). A run that
    takes longer than `timeout_s`, if given, is ended and repeated, at most twice. Raises NotFoundError if perf_analyzer
    is not unpacked, ShapeshiftError with its output if it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "inputs.json"
        data.write_text(json.dumps({"data": [dict(one) for one in inputs]}))
        warm_up = max(concurrency * 2, count // 10)
        _run(folder, url, model, data, concurrency, warm_up, Path(scratch) / "warm.json", timeout_s, streaming)
        export = Path(scratch) / "profile.json"
        _run(folder, url, model, data, concurrency, count, export, timeout_s, streaming)
        return _read(export)


def _run(
    folder: Path,
    url: str,
    model: str,
    data: Path,
    concurrency: int,
    count: int,
    export: Path,
    timeout_s: float | None,
    streaming: bool,
) -> None:
    program = folder / "perf_analyzer"
    if not program.is_file():
        raise NotFoundError(f"no perf_analyzer at {program}; run `make setup`")
    command = [str(program), "-m", model, "-u", url, "-i", "grpc", "--input-data", str(data)]
    command += ["--concurrency-range", str(concurrency), "--request-count", str(count)]
    command += ["--profile-export-file", str(export), *(["--streaming"] if streaming else [])]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib")}
    done = _run_repeatedly(command, environment, timeout_s)
    if done.returncode or not export.is_file():
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise ShapeshiftError(f"perf_analyzer failed on model {model} at {url}: {' '.join(lines[-3:])}")


def _run_repeatedly(
    command: list[str], environment: dict[str, str], timeout_s: float | None
) -> subprocess.CompletedProcess[str]:
    for _ in range(_TRIES):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
            )
    raise ShapeshiftError(f"perf_analyzer did not end within {timeout_s:g} s in {_TRIES} runs")


def _read(export: Path) -> ClosedLoopResult:
    # It repeats the inputs, with the bytes of images as they are.
    text = export.read_text(encoding="utf-8", errors="replace")
    requests = json.loads(text, strict=False)["experiments"][0]["requests"]
    starts = np.array([request["timestamp"] for request in requests], dtype=np.float64)
    ends = np.array([request["response_timestamps"][-1] for request in requests], dtype=np.float64)
    firsts = np.array([request["response_timestamps"][0] for request in requests], dtype=np.float64)
    elapsed_s = (ends.max() - starts.min()) / 1e9
    return ClosedLoopResult(len(requests) / elapsed_s, (ends - starts) / 1e6, (firsts - starts) / 1e6)
