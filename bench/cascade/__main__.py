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

from bench.cascade import build, datasets, plots, report, train
from bench.cascade.report import Row
from bench.cascade.task_bench import TaskBench, best_chain, profile
from bench.common import public_data
from bench.common.output import BUILD, FOLDER, Output
from shapeshift.cascade import candidates
from shapeshift.errors import ShapeshiftError

HEAVY = "12,24"
DEMO = Path("checkpoints/clinc150-minilm/candidates")


def main() -> int:
    """Measure, print, and write tables, data and plots to build/bench/."""
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
    try:
        rows = quick(options, output) if options.quick else full(options, output)
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    output.data["tables"] = {task: [report.plain(row) for row in of_task] for task, of_task in rows.items()}
    output.save([plots.draw(task, of_task, FOLDER) for task, of_task in rows.items()])
    return 0


def quick(options: argparse.Namespace, output: Output) -> dict[str, list[Row]]:
    """Measure CLINC150 with the demo's two levels and its candidate; the rows of its table by task."""
    chosen = candidates.serving(DEMO, "clinc150")
    bench = TaskBench(datasets.read("clinc150"), BUILD / "engines", chosen.table, chosen.candidate, options)
    output.say(bench.compare(options.texts or 1000))
    heavier(bench, options.heavy or "", output)
    if not options.without_server:
        requests = min(options.requests, 200)
        output.say(bench.through_server((BUILD / "repository",), "classify_text", requests))
    return {"clinc150-demo": bench.rows}


def full(options: argparse.Namespace, output: Output) -> dict[str, list[Row]]:
    """Measure all tasks with fine-tuned models, and the heavier setting; the rows of their tables by task."""
    rows: dict[str, list[Row]] = {}
    depths = [int(depth) for depth in options.depths.split(",")]
    tasks = options.tasks.split(",") if options.tasks else datasets.available()
    for task in tasks:
        splits = datasets.read(task)
        train.train_missing(task, splits, depths)
        names = build.build_models(task, depths, len(splits.labels))
        engines = build.build_paths().engines
        table = profile(task, splits, engines, names, options.profile_texts, options.seed)
        bench = TaskBench(splits, engines, table, best_chain(table), options)
        output.say(bench.compare(options.texts))
        if not options.without_server:
            candidates.put(build.CANDIDATES, bench.table, bench.ours.name, pinned=False)
            front = build.publish_front(task)
            output.say(bench.through_server((build.build_paths().generated,), front, options.requests))
        rows[task] = bench.rows
        if task == tasks[0]:
            heavier(bench, HEAVY if options.heavy is None else options.heavy, output)
    return rows


def heavier(bench: TaskBench, depths: str, output: Output) -> None:
    """Measure the first level and its decisions with large models of so many layers."""
    for layers in depths.split(","):
        if layers:
            output.say(bench.heavier(int(layers), 300))


if __name__ == "__main__":
    sys.exit(main())
