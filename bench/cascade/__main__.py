"""`make bench BENCH=cascade`: a small model first and a large one when it is unsure, against one model for all texts.

    always large        the best single model (INFaaS)
    always small        the first level alone
    voting              the smaller models at once, each on its own core (Cocktail)
    ours                the candidate that the profile selects, and the same without each of its parts
    three levels        the best candidate of three models

Missing models are fine-tuned first (python -m bench.cascade.train). Engines run at batch 1 on one thread: each text
runs on each model once, in random order, and every system is computed from these measurements, with the decisions of
the server, which are timed. Then two systems run through a Triton server, closed loop and open loop. --quick uses the
demo's models and trains none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.cascade import build, datasets, train
from bench.cascade.task_bench import TaskBench, best_chain, profile
from bench.common import public_data
from bench.common.output import BUILD, Output, program
from shapeshift.cascade import candidates

HEAVY = "12,24"
DEMO = Path("checkpoints/clinc150-minilm/candidates")


@program
def main() -> int:
    """Measure, print, and write tables and data to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.cascade", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: the demo's models, fewer texts")
    parser.add_argument("--tasks", help=f"of {','.join(datasets.TASKS)} (default: those whose data are there)")
    parser.add_argument("--depths", default=",".join(map(str, train.DEPTHS)), help="layers of the models")
    parser.add_argument("--texts", type=int, default=0, help="of each test set; 0: all")
    parser.add_argument("--profile-texts", type=int, default=1000, help="of each validation set")
    parser.add_argument("--requests", type=int, default=400, help="through the server, for each system and load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-server", action="store_true")
    parser.add_argument(
        "--heavy", help="layers of the random models behind the first task's (default: 12,24; --quick: none)"
    )
    options = parser.parse_args()
    output = Output("cascade", {"seed": options.seed, "data": public_data.described()})
    (quick if options.quick else full)(options, output)
    output.save()
    return 0


def quick(options: argparse.Namespace, output: Output) -> None:
    """Measure CLINC150 with the demo's two levels and its candidate."""
    chosen = candidates.serving(DEMO, "clinc150")
    bench = TaskBench(datasets.read("clinc150"), BUILD / "engines", chosen.table, chosen.candidate, options)
    output.data["tables"] = {"clinc150-demo": bench.compare(options.texts or 1000, output)}
    heavier(bench, options.heavy or "", output)
    if not options.without_server:
        requests = min(options.requests, 200)
        rows = bench.through_server((BUILD / "repository",), "classify_text", requests, output)
        output.data["served"] = {"clinc150-demo": rows}


def full(options: argparse.Namespace, output: Output) -> None:
    """Measure all tasks with fine-tuned models, and the heavier setting."""
    output.data |= {"tables": {}, "served": {}}
    depths = [int(depth) for depth in options.depths.split(",")]
    tasks = options.tasks.split(",") if options.tasks else datasets.available()
    for task in tasks:
        splits = datasets.read(task)
        train.train_missing(task, splits, depths)
        names = build.build_models(task, depths)
        paths = build.build_paths()
        table = profile(task, splits, paths.engines, names, options.profile_texts, options.seed)
        bench = TaskBench(splits, paths.engines, table, best_chain(table), options)
        output.data["tables"][task] = bench.compare(options.texts, output)
        if not options.without_server:
            candidates.put(build.CANDIDATES, bench.table, bench.ours.name, pinned=False)
            front = build.publish_front(task)
            output.data["served"][task] = bench.through_server((paths.generated,), front, options.requests, output)
        if task == tasks[0]:
            heavier(bench, HEAVY if options.heavy is None else options.heavy, output)


def heavier(bench: TaskBench, depths: str, output: Output) -> None:
    """Measure the first level and its decisions with large models of so many layers."""
    for layers in depths.split(","):
        if layers:
            bench.heavier(int(layers), 300, output)


if __name__ == "__main__":
    sys.exit(main())
