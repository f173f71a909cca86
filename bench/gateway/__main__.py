"""`make bench BENCH=gateway`: what the gateway adds to a request, and infinity's API beside it.

--parts chooses: added (the default), infinity (which makes an environment of its own first: minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from bench.common.output import BUILD, FOLDER, Output, name_of_parts, program
from bench.common.server import running_server
from bench.gateway import added, infinity
from bench.gateway.ways import DirectWay, HttpWay
from shapeshift.cli.gateway import child
from shapeshift.triton.embedded.free_ports import free_ports

USUAL = ("added",)


@program
def main() -> int:
    """Measure, print, and write the tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--parts", nargs="+", choices=(*USUAL, "infinity"), default=USUAL)
    options = parser.parse_args()
    requests, rounds, seconds = (200, 3, 2.0) if options.quick else (1000, 5, 5.0)
    settings = {"requests": requests, "rounds": rounds, "clients": added.CLIENTS, "parts": " ".join(options.parts)}
    output = Output("gateway", settings, name_of_parts("gateway", options.parts, USUAL))
    if "added" in options.parts:
        measure(output, requests, rounds, seconds)
    if "infinity" in options.parts:
        infinity.measure(output, requests, rounds)
    output.save()
    return 0


def measure(output: Output, requests: int, rounds: int, seconds: float) -> None:
    """The part `added`, on a server of its own."""
    with running_server(("encode", "generate"), (BUILD / "repository",), FOLDER / "run") as server:
        port = next(iter(free_ports()))
        with child(server.settings, port) as gateway, asyncio.Runner() as runner:
            gateway.start()
            direct, http = DirectWay(server.grpc_url), HttpWay(f"127.0.0.1:{port}")
            runner.run(http.wait_ready())
            rows, rate = runner.run(added.measured(direct, http, requests, rounds, seconds))
    output.table("one client", rows)
    output.table("embeddings/s, median of rounds", [rate])
    output.data["gateway"] = [*rows, rate]


if __name__ == "__main__":
    sys.exit(main())
