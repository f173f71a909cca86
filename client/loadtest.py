"""perf_analyzer against a running server, with real inputs for every front model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from client import hardware
from client.load_inputs import LAWS, Choice, make
from client.perf_analyzer import measure
from client.report import head
from shapeshift import settings
from shapeshift.errors import ShapeshiftError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each concurrency. Returns 2, with a line on standard error, for errors that the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m client.loadtest", description=__doc__)
    parser.add_argument("--model", default="encode")
    parser.add_argument("--url", default="localhost:8001", help="host:port of the server's gRPC endpoint")
    parser.add_argument("--concurrency", default="8", help="requests in flight; several separated by commas")
    parser.add_argument("--requests", type=int, default=500, help="measured requests, after a warm-up of a tenth")
    parser.add_argument("--lengths", choices=tuple(LAWS), default="short", help="of texts and prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of each generated answer (%(default)s)")
    parser.add_argument("--adapters", default="", help="of a model with adapters, separated by commas (default: all)")
    parser.add_argument("--images", default="", help="folder of JPEG and PNG files (default: made images)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder of generated files (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except ShapeshiftError as error:
        print(f"client.loadtest: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    loops = options.concurrency.split(",")
    allowed = "must be whole numbers from 1, separated by commas"
    settings.require(all(part.isdecimal() and int(part) for part in loops), "concurrency", options.concurrency, allowed)
    settings.require(options.requests >= 1, "requests", options.requests, "at least 1")
    settings.require(options.tokens >= 1, "tokens", options.tokens, "at least 1")
    adapters = tuple(filter(None, options.adapters.split(",")))
    count = min(options.requests, 500)
    choice = Choice(count, options.lengths, options.tokens, options.images, adapters, options.seed)
    inputs = make(options.url, options.model, choice, options.build)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    print(head({"settings": {**shown, "inputs": inputs.described}, "hardware": hardware.describe()}))
    for concurrency in map(int, loops):
        result = measure(
            options.url,
            options.model,
            inputs.entries,
            concurrency,
            options.requests,
            options.build / "perf_analyzer",
            streaming=inputs.streaming,
        )
        p50, p90, p98, p99 = np.percentile(result.latency_ms, [50, 90, 98, 99])
        print(
            f"concurrency {concurrency:3}: {result.per_second:8.1f} requests/s; latency ms: "
            f"mean {result.latency_ms.mean():.2f}, p50 {p50:.2f}, p90 {p90:.2f}, p98 {p98:.2f}, p99 {p99:.2f}"
        )
        if inputs.streaming:
            p50, p99 = np.percentile(result.first_ms, [50, 99])
            print(f"{' ' * 17}first response ms: mean {result.first_ms.mean():.2f}, p50 {p50:.2f}, p99 {p99:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
