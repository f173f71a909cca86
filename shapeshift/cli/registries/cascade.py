"""`shapeshift cascade`: profile candidates, list them, and choose the one that serves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import Candidate, CandidateTable
from shapeshift.cascade.policy import routing
from shapeshift.cascade.policy.selection import Choice, choose
from shapeshift.cascade.profiling import register as profiler
from shapeshift.cascade.profiling.register import ProfilingSettings
from shapeshift.cascade.profiling.samples import read
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.progress import Progress
from shapeshift.registry import require_folder

_BOTH = "both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `shapeshift cascade`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    register = actions.add_parser("register", help="profile models on a labelled sample and choose a candidate")
    _common(register)
    register.add_argument("--sample", type=Path, required=True, help=".jsonl or .tsv of labelled texts")
    register.add_argument("--models", required=True, help="front models that `shapeshift engines` has built: a,b,c")
    register.add_argument("--engines", type=Path, default=Path("build/engines"))
    register.add_argument("--algorithm", choices=[*routing.ALGORITHMS, _BOTH], default="sigmoid")
    register.add_argument("--k", type=float, default=ProfilingSettings.k, help="slope of the sigmoid")
    register.add_argument("--levels", type=int, default=ProfilingSettings.max_levels, help="most levels of a cascade")
    register.add_argument("--tolerance", type=float, default=0.0, help="of a regression: a number is right within it")
    register.add_argument("--rows", type=int, default=0, help="use so many texts of the sample, evenly spread; 0: all")
    _targets(register)
    select = actions.add_parser("select", help="choose again from the table, by other targets or by name")
    _common(select)
    _targets(select)
    select.add_argument("--candidate", help="choose this candidate and pin it")
    _common(actions.add_parser("list", help="the candidates of all tasks"), task=False)


def run(options: argparse.Namespace) -> int:
    """Run one action; 1 where no candidate meets the targets."""
    options.dir = Path(require_folder("dir", options.dir))
    return {"register": _register, "select": _select, "list": _list}[str(options.action)](options)


def _common(parser: argparse.ArgumentParser, task: bool = True) -> None:
    parser.add_argument("--dir", required=True, help="the registry: candidates_dir of config.pbtxt")
    if task:
        parser.add_argument("--task", required=True)


def _targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="0 to 1; holds with 95%% confidence")
    parser.add_argument("--max-latency-ms", type=float, default=0.0, help="mean engine and control time; 0: any")


def _register(options: argparse.Namespace) -> int:
    names = [name for name in options.models.split(",") if name]
    if len(set(names)) < len(names) or not names:
        raise InvalidInputError("models", options.models, "each name once")
    sample = read(options.sample).subset(options.rows)
    algorithms = tuple(routing.ALGORITHMS) if options.algorithm == _BOTH else (options.algorithm,)
    profiling = ProfilingSettings(options.k, algorithms, options.levels, options.tolerance)
    progress = Progress(options.task)
    try:
        table = profiler.profile(options.task, sample, options.engines, names, profiling, progress)
    finally:
        progress.done()
    choice = choose(table.candidates, options.min_accuracy, options.max_latency_ms)
    _show(table, None)
    serving = _report(choice, options)
    file = candidates.put(options.dir, table, serving.name, pinned=False)
    sys.stdout.write(f"{file}: candidate {serving.name} serves task {options.task}\n")
    return 0 if choice.selected else 1


def _select(options: argparse.Namespace) -> int:
    before = candidates.serving(options.dir, options.task)
    if options.candidate:
        serving, met = before.table.candidate(options.candidate), True
    else:
        choice = choose(before.table.candidates, options.min_accuracy, options.max_latency_ms)
        serving, met = _report(choice, options), choice.selected is not None
    candidates.put(options.dir, before.table, serving.name, pinned=bool(options.candidate))
    sys.stdout.write(f"candidate {serving.name} serves task {options.task}\n")
    return 0 if met else 1


def _list(options: argparse.Namespace) -> int:
    tasks = candidates.entries(options.dir)
    if not tasks:
        raise NotFoundError(f"no candidates in {options.dir}; run `shapeshift cascade register`")
    for task in tasks:
        serving = candidates.serving(options.dir, task)
        sys.stdout.write(f"task {task}\n")
        _show(serving.table, serving.candidate)
    return 0


def _report(choice: Choice[Candidate], options: argparse.Namespace) -> Candidate:
    if choice.selected:
        return choice.selected
    best = choice.nearest
    sys.stdout.write(
        f"no accuracy bound reaches {100 * options.min_accuracy:g}% within {options.max_latency_ms or 'any'} ms; "
        f"the best is {best.name}: {100 * best.accuracy:.2f}%, {_bound(best)}, {best.latency_ms:.3f} ms\n"
    )
    return best


def _bound(one: Candidate) -> str:
    if one.accuracy_bound is None:
        return "no bound (run `shapeshift cascade register` again)"
    return f"at least {100 * one.accuracy_bound:.2f}%"


def _show(table: CandidateTable, serving: Candidate | None) -> None:
    for model in table.models:
        sys.stdout.write(
            f"  {model.name}: accuracy {100 * model.accuracy:.2f}%, {model.latency_ms:.3f} ms, temperature "
            f"{model.temperature:.3f}, calibration error {model.ece:.3f}\n"
        )
    sys.stdout.write(
        f"  {'candidate':60} {'accuracy':>8} {'at least':>8} {'mean ms':>8} {'p75':>7} {'p99':>7} {'early':>6} "
        f"{'pruned':>6}\n"
    )
    for one in table.candidates:
        mark = "*" if serving and one.name == serving.name else " "
        bound = "-" if one.accuracy_bound is None else f"{100 * one.accuracy_bound:.2f}%"
        sys.stdout.write(
            f"{mark} {one.name:60} {100 * one.accuracy:7.2f}% {bound:>8} {one.latency_ms:8.3f} {one.p75_ms:7.3f} "
            f"{one.p99_ms:7.3f} {100 * one.shares[0]:5.1f}% {100 * one.pruned:5.1f}%\n"
        )
