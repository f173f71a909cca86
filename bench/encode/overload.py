"""`python -m bench.encode.overload`: open-loop load beyond capacity: refusals at once, good answers within the bound.

Short texts at 1.5 times what the machine carries, long texts at 3 times. Capacity is measured in the same run: right
answers a second with `--in-flight` requests open all the time, by texts of that length alone.

The client stands for clients on machines of their own. Where it may, it asks Linux to run it before the server
(SCHED_RR): on the server's cores it would else be late itself. The table shows by how much it was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common.foreign_load import ForeignLoad
from bench.common.front_variants import ENGINES, publish_variant
from bench.common.output import FOLDER, Output, empty
from bench.common.server import loaded_server
from client.open_loop import PlannedRequest, replay
from client.report import Report
from shapeshift.engines import manifest
from shapeshift.workloads.arrivals import poisson
from shapeshift.workloads.text import TextMaker

REFUSED_WITHIN_MS = 50.0
# Tokens of a text, and how many times the capacity is offered.
LOADS = {"short": (16, 1.5), "long": (480, 3.0)}
_MODEL = "encode_bounded"
_TEXTS = 64
_REFUSED = "UNAVAILABLE"


@dataclass(frozen=True)
class Overload:
    """One load. refusal_p99_ms, good_max_ms: from the intended instant; 0 without refusals, or without answers.

    late_p99_ms: by which the client sent requests late; the other two hold it.
    """

    name: str
    capacity_per_s: float
    offered_per_s: float
    good: int
    refused: int
    other: int
    refusal_p99_ms: float
    good_max_ms: float
    late_p99_ms: float

    def missed(self, bound_ms: float) -> list[str]:
        """A line for each demand that does not hold."""
        lines = []
        if self.refusal_p99_ms > REFUSED_WITHIN_MS:
            lines.append(f"{self.name}: refusals within {self.refusal_p99_ms:.0f} ms at p99, not {REFUSED_WITHIN_MS:g}")
        if self.good_max_ms > bound_ms:
            lines.append(f"{self.name}: good answers within {self.good_max_ms:.0f} ms, the bound is {bound_ms:g}")
        if self.other:
            lines.append(f"{self.name}: {self.other} requests ended otherwise")
        return lines


def summarise(name: str, capacity_per_s: float, report: Report) -> Overload:
    """What a replay shows."""
    summary = report.summary()
    refused = report.kind == _REFUSED
    latency_ms = report.latency_s * 1e3
    return Overload(
        name,
        capacity_per_s,
        summary.offered_per_s,
        int(report.ok.sum()),
        int(refused.sum()),
        int((~report.ok & ~refused).sum()),
        float(np.percentile(latency_ms[refused], 99)) if refused.any() else 0.0,
        float(latency_ms[report.ok].max()) if report.ok.any() else 0.0,
        summary.late_p99_ms,
    )


def main() -> int:
    """Measure both loads, print and write the table; 1 where a demand does not hold."""
    parser = argparse.ArgumentParser(prog="python -m bench.encode.overload", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load (%(default)g)")
    parser.add_argument("--in-flight", type=int, default=16, help="while the capacity is measured (%(default)d)")
    parser.add_argument("--max-queue-ms", type=float, default=2000.0, help="bound of the front (%(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bound_ms = options.max_queue_ms
    output = Output("encode", {"seed": options.seed, "seconds": options.seconds, "max_queue_ms": bound_ms}, "overload")
    rng = np.random.default_rng(options.seed)
    engines = manifest.load(ENGINES).engines
    repository = FOLDER / "repository"
    empty(repository)
    publish_variant(_MODEL, engines, repository, packs_rows=True, parameters={"max_queue_ms": f"{bound_ms:g}"})
    overloads = []
    with loaded_server({_MODEL: len(engines)}, (repository,)) as server, ForeignLoad() as foreign:
        # Once the server runs: it must not inherit this.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        for name, (tokens, times) in LOADS.items():
            inputs = _inputs(tokens, rng)
            capacity = asyncio.run(_capacity(server.grpc_url, inputs, options.in_flight, options.seconds / 2))
            instants = poisson(times * capacity, options.seconds, rng).tolist()
            planned = [PlannedRequest(at_s, inputs[number % len(inputs)]) for number, at_s in enumerate(instants)]
            overloads.append(summarise(name, capacity, asyncio.run(replay(server.grpc_url, _MODEL, planned))))
    output.table("texts beyond capacity; times in ms", [vars(one) for one in overloads])
    missed = [line for one in overloads for line in one.missed(bound_ms)]
    output.say(f"other processes used {foreign.cores:.2f} cores meanwhile")
    for line in missed:
        output.say(f"MISSED {line}")
    output.data |= {"loads": [vars(one) for one in overloads], "missed": missed}
    output.save()
    return int(bool(missed))


def _inputs(tokens: int, rng: np.random.Generator) -> list[dict[str, NDArray[Any]]]:
    maker = TextMaker(rng)
    return [{"TEXT": np.array([[maker.text(tokens)]], dtype=object)} for _ in range(_TEXTS)]


async def _capacity(url: str, inputs: list[dict[str, NDArray[Any]]], in_flight: int, seconds: float) -> float:
    """Right answers a second with so many requests open all the time: a replay whose requests are all due at once."""
    count = in_flight
    while True:
        planned = [PlannedRequest(0.0, inputs[number % len(inputs)]) for number in range(count)]
        report = await replay(url, _MODEL, planned, max_in_flight=count)
        took = float(np.nanmax(report.done_s))
        if took >= seconds / 4 or not report.ok.all():
            return float(report.ok.sum()) / took
        count *= 2


if __name__ == "__main__":
    sys.exit(main())
