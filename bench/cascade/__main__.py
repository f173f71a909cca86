"""`make bench BENCH=cascade`: a small model first and a large one when it is unsure, against one model for all texts.

    always large        the best single model (INFaaS)
    always small        the first level alone
    ours                the candidate that serves, and the same without each of its parts

The models are those of checkpoints/text-classifiers. Engines run at batch 1 on one thread: each text runs on each model
once, in random order, and every system is computed from these measurements, with the decisions of the server, which are
timed. Times are processor times. Then the demo runs through a Triton server, closed loop and open loop.
"""

from __future__ import annotations

import sys

from bench.cascade import zoo
from bench.cascade.task_bench import TaskBench
from bench.common import public_data
from bench.common.output import Output, parser, program

_QUICK_TEXTS = 1000


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    options = parser("cascade", __doc__, "under 3 minutes: 1000 texts")
    options.add_argument("--tasks", default=zoo.DEMO, help=f"of {','.join((zoo.DEMO, *zoo.LAYERS))} (%(default)s)")
    options.add_argument("--without-server", action="store_true")
    chosen = options.parse_args()
    output = Output("cascade", {"seed": chosen.seed, "data": public_data.described()})
    output.data |= {"tables": {}, "served": {}}
    for task in chosen.tasks.split(","):
        bench = TaskBench(task, chosen.seed)
        output.data["tables"][task] = bench.compare(_QUICK_TEXTS if chosen.quick else 0, output)
        if task == zoo.DEMO and not chosen.without_server:
            output.data["served"][task] = bench.through_server(output)
    output.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
