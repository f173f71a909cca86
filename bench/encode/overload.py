"""`python -m bench.encode.overload`: open-loop load beyond capacity: refusals at once, good answers within the bound.

Short texts at 1.5 times what the machine carries, long texts at 3 times. Capacity is measured in the same run: right
answers a second with 16 requests open all the time, by texts of that length alone.

The client stands for clients on machines of their own. Where it may, it asks Linux to run it before the server
(SCHED_RR): on the server's cores it would else be late itself. The table shows by how much it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.front_variants import ENGINES, publish_variant
from bench.common.output import FOLDER, Output, empty, parser, program
from bench.common.server import loaded_server
from bench.common.texts import Outcome, TritonModel
from client.open_loop import PlannedRequest, replay
from client.report import Report
from shapeshift.engines import manifest
from shapeshift.workloads.arrivals import poisson
from shapeshift.workloads.text import TextMaker

REFUSED_WITHIN_MS, BOUND_MS = 50.0, 2000.0
# Tokens of a text, and how many times the capacity is offered.
LOADS = {"short": (16, 1.5), "long": (480, 3.0)}
_MODEL, _TEXTS, _IN_FLIGHT = "encode_bounded", 64, 16
_REFUSED = "UNAVAILABLE"


def summarise(report: Report) -> dict[str, float]:
    """What a replay shows. refusal_p99_ms, good_max_ms: from the intended instant; 0 without refusals, or without
    answers. late_p99_ms: by which the client sent requests late; the other two hold it."""
    summary = report.summary()
    refused = report.kind == _REFUSED
    latency_ms = report.latency_s * 1e3
    return {
        "offered_per_s": summary.offered_per_s,
        "good": int(report.ok.sum()),
        "refused": int(refused.sum()),
        "other": int((~report.ok & ~refused).sum()),
        "refusal_p99_ms": float(np.percentile(latency_ms[refused], 99)) if refused.any() else 0.0,
        "good_max_ms": float(latency_ms[report.ok].max()) if report.ok.any() else 0.0,
        "late_p99_ms": summary.late_p99_ms,
    }


def missed(figures: Mapping[str, float]) -> Iterator[str]:
    """A line for each demand that does not hold."""
    if figures["refusal_p99_ms"] > REFUSED_WITHIN_MS:
        yield f"refusals within {figures['refusal_p99_ms']:.0f} ms at p99, not {REFUSED_WITHIN_MS:g}"
    if figures["good_max_ms"] > BOUND_MS:
        yield f"good answers within {figures['good_max_ms']:.0f} ms, the bound is {BOUND_MS:g}"
    if figures["other"]:
        yield f"{figures['other']:.0f} requests ended otherwise"


@program
def main() -> int:
    """Measure both loads, print and write the table; 1 where a demand does not hold."""
    parse = parser("encode.overload", __doc__)
    parse.add_argument("--seconds", type=float, default=20.0, help="of each load (%(default)g)")
    options = parse.parse_args()
    settings = {"seed": options.seed, "seconds": options.seconds, "max_queue_ms": BOUND_MS}
    output = Output("encode.overload", settings, "overload")
    rng = np.random.default_rng(options.seed)
    engines = manifest.load(ENGINES).engines
    repository = FOLDER / "repository"
    empty(repository)
    publish_variant(_MODEL, engines, repository, packs_rows=True, parameters={"max_queue_ms": f"{BOUND_MS:g}"})
    rows = {}
    with loaded_server({_MODEL: len(engines)}, (repository,)) as server, ForeignLoad() as foreign:
        # Once the server runs: it must not inherit this.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        front, maker = TritonModel("", server.grpc_url, _MODEL), TextMaker(rng)
        for name, (tokens, times) in LOADS.items():
            texts = [maker.text(tokens) for _ in range(_TEXTS)]
            capacity = _capacity(front, texts, options.seconds / 8)
            inputs = [{"TEXT": np.array([[text]], dtype=object)} for text in texts]
            instants = poisson(times * capacity, options.seconds, rng).tolist()
            planned = [PlannedRequest(at_s, inputs[number % _TEXTS]) for number, at_s in enumerate(instants)]
            rows[name] = {"carries_per_s": capacity, **summarise(asyncio.run(replay(server.grpc_url, _MODEL, planned)))}
    output.table("texts beyond capacity; times in ms", [{"texts": name, **row} for name, row in rows.items()])
    output.say(f"other processes used {foreign.cores:.2f} cores meanwhile")
    lines = [f"{name}: {line}" for name, row in rows.items() for line in missed(row)]
    for line in lines:
        output.say(f"MISSED {line}")
    output.data |= {"loads": rows, "missed": lines}
    output.save()
    return int(bool(lines))


def _capacity(front: TritonModel, texts: list[str], seconds: float) -> float:
    """Right answers a second with `_IN_FLIGHT` requests open all the time, of a closed loop of at least `seconds`."""
    count = _IN_FLIGHT
    while True:
        outcome: Outcome = front.closed(texts, _IN_FLIGHT, count)
        if outcome.failed or count >= seconds * outcome.per_second:
            return outcome.per_second
        count *= 2


if __name__ == "__main__":
    sys.exit(main())
