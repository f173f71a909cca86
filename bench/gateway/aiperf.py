"""AIPerf's profiles of embeddings and of a chat against a gateway that runs.

AIPerf has an environment of its own below build/peers (made at first use: minutes) and counts tokens with the local
tokenizers of the models; nothing is downloaded but its packages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common.output import Row, table
from bench.peers.venv import tail, without_torch
from shapeshift.errors import UnsupportedError

PROJECT = Path(__file__).resolve().parents[2]
# Its services are processes of their own, which start slowly on a busy machine.
_START_S, _MOST_S = 300, 3600


@dataclass(frozen=True)
class Profile:
    """What AIPerf sends: prompts of `tokens` tokens to `model`. checkpoint: the folder with its tokenizer."""

    model: str
    checkpoint: Path
    endpoint: str
    tokens: int
    more: tuple[str, ...] = ()


PROFILES = {
    "embeddings": Profile("encode", PROJECT / "build" / "checkpoints" / "all-MiniLM-L6-v2", "embeddings", 30),
    "chat": Profile(
        "chat",
        PROJECT / "checkpoints" / "docstrings-chat",
        "chat",
        40,
        ("--streaming", "--osl", "32", "--extra-inputs", "ignore_eos:true"),
    ),
}
# The line of the table: a metric of AIPerf's export, and which of its values.
LINES = {
    "requests/s": ("request_throughput", "avg"),
    "latency ms, p50": ("request_latency", "p50"),
    "latency ms, p99": ("request_latency", "p99"),
    "first token ms, p50": ("time_to_first_token", "p50"),
    "first token ms, p99": ("time_to_first_token", "p99"),
    "between tokens ms, p50": ("inter_token_latency", "p50"),
    "output tokens/s": ("output_token_throughput", "avg"),
    "prompt tokens, mean": ("input_sequence_length", "avg"),
    "requests": ("request_count", "avg"),
    "errors": ("error_request_count", "avg"),
}


def main() -> int:
    """Print a table. Returns 2, with a line on standard error, where AIPerf cannot be installed or fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.aiperf", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8080", help="of the gateway (%(default)s)")
    parser.add_argument("--profiles", nargs="+", choices=tuple(PROFILES), default=tuple(PROFILES))
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (%(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="of each profile (%(default)s)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    options = parser.parse_args()
    try:
        program = without_torch("aiperf", options.build).ensure().with_name("aiperf")
        exports = {}
        for name in options.profiles:
            folder = options.build.resolve() / "bench" / f"aiperf-{name}"
            exports[name] = run(program, command(PROFILES[name], options), folder)
    except UnsupportedError as error:
        print(f"bench.gateway.aiperf: {error}", file=sys.stderr)
        return 2
    print(table(options.url, rows(exports)))
    return 0


def command(profile: Profile, options: argparse.Namespace) -> list[str]:
    """AIPerf's arguments for a profile."""
    return [
        *("profile", "--model", profile.model, "--tokenizer", str(profile.checkpoint), "--url", options.url),
        *("--endpoint-type", profile.endpoint, "--isl", str(profile.tokens), *profile.more),
        *("--concurrency", str(options.concurrency), "--request-count", str(options.requests)),
        *("--warmup-request-count", str(options.concurrency), "--random-seed", "0", "--workers-max", "2"),
        *("--ui-type", "none", "--no-gpu-telemetry", "--no-server-metrics"),
    ]


def run(program: Path, arguments: list[str], folder: Path) -> Mapping[str, Any]:
    """AIPerf's export, by metric. Raises UnsupportedError, with the end of what it said, where it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "said.log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**clean, "AIPERF_SERVICE_REGISTRATION_TIMEOUT": str(_START_S), "HF_HOME": str(folder)}
    with log.open("wb") as said:
        try:
            code = subprocess.run(
                [program, *arguments, "--artifact-dir", folder],
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                env=environment,
                timeout=_MOST_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    export = folder / "profile_export_aiperf.json"
    if code or not export.is_file():
        raise UnsupportedError(f"aiperf ended with status {code}; {log} ends\n{tail(log)}")
    metrics: dict[str, Any] = json.loads(export.read_text())
    return metrics


def rows(exports: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """A row for each of `LINES` that a profile has, a column for each profile."""
    shown: list[Row] = []
    for title, (metric, value) in LINES.items():
        cells = {name: export[metric][value] for name, export in exports.items() if value in export.get(metric, {})}
        shown += [{"": title, **cells}] if cells else []
    return shown


if __name__ == "__main__":
    sys.exit(main())
