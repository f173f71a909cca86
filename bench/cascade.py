"""`make bench BENCH=cascade`: a small model first, a large one when unsure, against one model for everything.

    always large        the best single model (INFaaS)
    always small        the first level alone
    voting              the smaller models at once, each on a core of its own (Cocktail)
    ours                the candidate that the profile selects, and with each of its parts switched off
    three levels        the best candidate of three models

Models are fine-tuned first where they are not there (python -m bench.cascade_train). Engines, batch 1, one thread: each
text runs on each model once, in random order, and all systems are made of these pieces, with the decisions that serve,
timed. Then the same through a Triton server, closed loop and open loop. --quick takes the demo's models, trains none.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import cascade_build, cascade_data, cascade_plots, cascade_report, cascade_train
from bench.cascade_report import Row
from bench.cascade_task import TaskBench, best_chain, profile
from client import hardware
from client.report import head
from shapeshift.cascade import registry
from shapeshift.errors import ShapeshiftError

HEAVY = "12,24"
BUILD, DEMO = Path("build"), Path("checkpoints/clinc150-minilm/candidates")


def main() -> int:
    """Run, print, and write tables, data and plots to build/bench/."""
    parser = argparse.ArgumentParser(prog="python -m bench.cascade", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: the demo's models, fewer texts")
    parser.add_argument("--tasks", default=",".join(cascade_data.TASKS))
    parser.add_argument("--depths", default=",".join(map(str, cascade_train.DEPTHS)), help="layers of the models")
    parser.add_argument("--texts", type=int, default=0, help="of each test set; 0: all")
    parser.add_argument("--profile-texts", type=int, default=1000, help="of each validation set")
    parser.add_argument("--requests", type=int, default=400, help="through the server, for each system and load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-server", action="store_true")
    parser.add_argument(
        "--heavy", help="layers of the random models behind the first task's (default: 12,24; --quick: none)"
    )
    options = parser.parse_args()
    settings = {"command": f"python -m bench.cascade {' '.join(sys.argv[1:])}".strip(), "seed": options.seed}
    text = head({"settings": settings, "hardware": hardware.describe()})
    print(text, flush=True)
    try:
        parts, rows = quick(options) if options.quick else full(options)
    except ShapeshiftError as error:
        print(f"make bench: {error}", file=sys.stderr)
        return 2
    folder = BUILD / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    data = {task: [cascade_report.plain(row) for row in own] for task, own in rows.items()}
    (folder / "cascade.txt").write_text("\n".join([text, *parts]))
    (folder / "cascade.json").write_text(json.dumps({"settings": settings, "tables": data}, indent=1))
    drawn = [cascade_plots.draw(task, own, folder) for task, own in rows.items()]
    print(f"written: build/bench/cascade.txt, cascade.json, {', '.join(drawn)}")
    return 0


def quick(options: argparse.Namespace) -> tuple[list[str], dict[str, list[Row]]]:
    """CLINC150 with the demo's two levels and its candidate."""
    chosen = registry.chosen(DEMO, "clinc150")
    bench = TaskBench(cascade_data.read("clinc150"), BUILD / "engines", chosen.table, chosen.candidate, options)
    parts = [bench.compare(options.texts or 1000), *heavier(bench, options.heavy or "")]
    if not options.without_server:
        parts.append(bench.through_server((BUILD / "repository",), "classify_text", min(options.requests, 200)))
    return parts, {"clinc150-demo": bench.rows}


def full(options: argparse.Namespace) -> tuple[list[str], dict[str, list[Row]]]:
    """All tasks with fine-tuned models, and the heavier setting."""
    parts: list[str] = []
    rows: dict[str, list[Row]] = {}
    depths = [int(depth) for depth in options.depths.split(",")]
    for task in options.tasks.split(","):
        splits = cascade_data.read(task)
        cascade_train.train_missing(task, splits, depths)
        names = cascade_build.build_models(task, depths, len(splits.labels))
        engines = cascade_build.places().engines
        table = profile(task, splits, engines, names, options.profile_texts, options.seed)
        bench = TaskBench(splits, engines, table, best_chain(table), options)
        parts.append(bench.compare(options.texts))
        if not options.without_server:
            registry.put(cascade_build.CANDIDATES, bench.table, bench.ours.name, pinned=False)
            front = cascade_build.publish_front(task)
            parts.append(bench.through_server((cascade_build.places().generated,), front, options.requests))
        rows[task] = bench.rows
        if task == options.tasks.split(",")[0]:
            parts += heavier(bench, HEAVY if options.heavy is None else options.heavy)
    return parts, rows


def heavier(bench: TaskBench, depths: str) -> list[str]:
    """The first level and its decisions before models of so many layers."""
    return [bench.heavier(int(layers), 300) for layers in depths.split(",") if layers]


if __name__ == "__main__":
    sys.exit(main())
