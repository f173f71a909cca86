"""`make bench BENCH=cascade`: a small model first and a large one when it is unsure, against one model for all texts.

    always large        the best single model (INFaaS)
    always small        the first level alone
    ours                the candidate that serves, and the same without each of its parts

The models are those of checkpoints/text-classifiers. Engines run at batch 1 on one thread: each text runs on each model
once, in random order, and every system is computed from these measurements, with the decisions of the server, which are
timed. Times are processor times. Then the demo runs through a Triton server, closed loop and open loop.
"""

from __future__ import annotations

import argparse
import sys

from bench.cascade import zoo
from bench.cascade.task_bench import TaskBench
from bench.common import public_data
from bench.common.output import Output, program

_QUICK_TEXTS = 1000


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.cascade", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: fewer texts")
    parser.add_argument("--tasks", default=zoo.DEMO, help=f"of {','.join((zoo.DEMO, *zoo.LAYERS))} (%(default)s)")
    parser.add_argument("--texts", type=int, default=0, help="of the test set; 0: all, with --quick 1000")
    parser.add_argument("--requests", type=int, default=200, help="through the server, for each system and load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-server", action="store_true")
    options = parser.parse_args()
    output = Output("cascade", {"seed": options.seed, "data": public_data.described()})
    texts = options.texts or (_QUICK_TEXTS if options.quick else 0)
    output.data |= {"tables": {}, "served": {}}
    for task in options.tasks.split(","):
        bench = TaskBench(task, options.seed)
        output.data["tables"][task] = bench.compare(texts, output)
        if task == zoo.DEMO and not options.without_server:
            output.data["served"][task] = bench.through_server(options.requests, output)
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
