"""`make bench BENCH=gateway`: what the gateway adds to a request, how soon it cancels, and infinity's API beside it.

--parts chooses: added and cancellation (the default), infinity (which makes an environment of its own first: minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from urllib.parse import urlsplit

import numpy as np

from bench.common.output import BUILD, FOLDER, Output, empty, name_of_parts
from bench.common.server import running_server
from bench.gateway import added, cancellation, infinity
from bench.gateway.ways import DirectWay, HttpWay
from shapeshift.cli.gateway import child
from shapeshift.errors import ShapeshiftError
from shapeshift.triton.embedded.free_ports import free_ports

USUAL = ("added", "cancellation")


def main() -> int:
    """Measure, print, and write the tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--parts", nargs="+", choices=(*USUAL, "infinity"), default=USUAL)
    options = parser.parse_args()
    requests, rounds, seconds = (200, 3, 2.0) if options.quick else (1000, 5, 5.0)
    try:
        settings = {"requests": requests, "rounds": rounds, "clients": added.CLIENTS, "parts": " ".join(options.parts)}
        output = Output("gateway", settings, name_of_parts("gateway", options.parts, USUAL))
        if set(USUAL) & set(options.parts):
            _own(output, options.parts, requests, rounds, seconds)
        if "infinity" in options.parts:
            infinity.measure(output, requests, rounds)
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    output.save()
    return 0


def _own(output: Output, parts: list[str], requests: int, rounds: int, seconds: float) -> None:
    """The parts that need no other program, on one server."""
    repository = FOLDER / "repository"
    empty(repository)
    cancellation.publish(repository)
    models = ("encode", "generate", cancellation.MODEL)
    with running_server(models, (BUILD / "repository", repository), FOLDER / "run") as server:
        port = next(iter(free_ports()))
        with child(server.settings, port) as gateway, asyncio.Runner() as runner:
            gateway.start()
            direct, http = DirectWay(server.grpc_url), HttpWay(urlsplit(f"http://127.0.0.1:{port}").netloc)
            runner.run(http.wait_ready())
            if "added" in parts:
                lines, output.data["gateway"] = runner.run(added.measured(direct, http, requests, rounds, seconds))
                output.say("\n".join(lines))
            if "cancellation" in parts:
                found = runner.run(cancellation.times(http, requests // 2)) * 1e3
                p50, p90, p99 = np.percentile(found, [50, 90, 99])
                output.say(
                    f"\nfrom a client's close to its slot in use again, {len(found)} times, ms:"
                    f" p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}, most {found.max():.0f}"
                )
                output.data["cancellation_ms"] = found.tolist()


if __name__ == "__main__":
    sys.exit(main())
