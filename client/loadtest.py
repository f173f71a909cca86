"""`make loadtest`: perf_analyzer against a running server, with texts of realistic lengths."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from client import hardware
from client.perf_analyzer import measure
from client.report import head
from shapeshift import settings
from shapeshift.errors import ShapeshiftError
from shapeshift.workloads import lengths
from shapeshift.workloads.text import TextMaker


def main() -> int:
    """Print a line for each concurrency. Returns 2, with a line on standard error, for errors that the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m client.loadtest", description=__doc__)
    parser.add_argument("--model", default="encode")
    parser.add_argument("--url", default="localhost:8001", help="host:port of the server's gRPC endpoint")
    parser.add_argument("--concurrency", default="8", help="requests in flight; several separated by commas")
    parser.add_argument("--requests", type=int, default=500, help="measured requests, after a warm-up of a tenth")
    parser.add_argument("--lengths", choices=("short", "long"), default="short")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        return _run(options)
    except ShapeshiftError as error:
        print(f"make loadtest: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    loops = options.concurrency.split(",")
    allowed = "must be whole numbers from 1, separated by commas"
    settings.require(all(part.isdecimal() and int(part) for part in loops), "concurrency", options.concurrency, allowed)
    rng = np.random.default_rng(options.seed)
    law = lengths.short() if options.lengths == "short" else lengths.long()
    maker = TextMaker(rng)
    texts = [maker.text(int(length)) for length in law.sample(rng, min(options.requests, 500))]
    print(head({"settings": vars(options), "hardware": hardware.describe()}))
    for concurrency in map(int, loops):
        result = measure(options.url, options.model, texts, concurrency, options.requests)
        p50, p90, p98, p99 = np.percentile(result.latency_ms, [50, 90, 98, 99])
        print(
            f"concurrency {concurrency:3}: {result.per_second:8.1f} requests/s; latency ms: "
            f"mean {result.latency_ms.mean():.2f}, p50 {p50:.2f}, p90 {p90:.2f}, p98 {p98:.2f}, p99 {p99:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
