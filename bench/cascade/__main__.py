"""`make bench BENCH=cascade`: a small model first and a large one when it is unsure, against one model for all texts.

    always large        the best single model (INFaaS)
    always small        the first level alone
    ours                the demo's candidate, and the same without each of its parts

Engines run at batch 1 on one thread: each text runs on each model once, in random order, and every system is computed
from these measurements, with the decisions of the server, which are timed. Then two systems run through a Triton
server, closed loop and open loop.
"""

from __future__ import annotations

import argparse
import sys

from bench.cascade.demo import DemoBench
from bench.common import public_data
from bench.common.output import Output, program

_QUICK_TEXTS = 1000


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.cascade", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: fewer texts")
    parser.add_argument("--texts", type=int, default=0, help="of the test set; 0: all, with --quick 1000")
    parser.add_argument("--requests", type=int, default=200, help="through the server, for each system and load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-server", action="store_true")
    parser.add_argument("--heavy", default="", help="also large models of random weights of so many layers: 12,24")
    options = parser.parse_args()
    output = Output("cascade", {"seed": options.seed, "data": public_data.described()})
    bench = DemoBench(options.seed)
    texts = options.texts or (_QUICK_TEXTS if options.quick else 0)
    output.data["tables"] = {"clinc150-demo": bench.compare(texts, output)}
    for layers in filter(None, options.heavy.split(",")):
        bench.heavier(int(layers), 300, output)
    if not options.without_server:
        output.data["served"] = {"clinc150-demo": bench.through_server(options.requests, output)}
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
