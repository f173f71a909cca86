"""`shapeshift cascade`: profile candidates, list them, and choose the one that serves."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from shapeshift.cascade import candidates
from shapeshift.cascade.candidates import Candidate, CandidateTable
from shapeshift.cascade.policy import routing
from shapeshift.cascade.policy.selection import Choice, choose
from shapeshift.cascade.profiling import register as profiler
from shapeshift.cascade.profiling.register import ProfilingSettings
from shapeshift.cascade.profiling.samples import read
from shapeshift.errors import InvalidInputError, NotFoundError, OverloadedError
from shapeshift.progress import Progress, say
from shapeshift.registry import require_folder
from shapeshift.settings import require
from shapeshift.triton import metrics
from shapeshift.triton.control import ModelControl
from shapeshift.triton.endpoint import tls_from_environment

_SWAP_S = 90.0
_BAR = 40
_BOTH = "both"
_SWAPS = "shapeshift_candidate_swaps_total"


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
    select.add_argument("--url", help="HOST:PORT of a server's gRPC: load new levels before, unload old ones after")
    select.add_argument("--metrics", help="metrics page of that server, http://HOST:PORT/metrics")
    select.add_argument("--front", default="classify_text", help="the cascade's model on that server")
    listing = actions.add_parser("list", help="the candidates of all tasks")
    _common(listing, task=False)
    listing.add_argument("--reliability", action="store_true", help="also the accuracy of each model by confidence")


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
    if options.url:
        _switch(options, before.table, before.candidate, serving)
    else:
        candidates.put(options.dir, before.table, serving.name, pinned=bool(options.candidate))
    sys.stdout.write(f"candidate {serving.name} serves task {options.task}\n")
    return 0 if met else 1


def _switch(options: argparse.Namespace, table: CandidateTable, before: Candidate, after: Candidate) -> None:
    """Load new levels before the registry changes, and unload unneeded ones after the front has swapped."""
    with ModelControl(options.url, os.environ.get("SHAPESHIFT_KEY", ""), tls_from_environment()) as control:
        _require_front(control, options)
        for model in after.levels[1:]:
            if not control.is_ready(model):
                control.load(model)
        swaps = _swaps(options)
        candidates.put(options.dir, table, after.name, pinned=bool(options.candidate))
        if before == after:
            return
        if options.metrics:
            say(f"waiting until {options.front} has swapped its candidate, at most {_SWAP_S:g} s")
        deadline = time.monotonic() + _SWAP_S
        while options.metrics and _swaps(options) <= swaps:
            if time.monotonic() > deadline:
                raise OverloadedError(
                    f"{options.front} has not swapped its candidate after {_SWAP_S:g} s; is {options.dir} its "
                    "candidates_dir? The log of the server has the reason of a refusal"
                )
            time.sleep(0.5)
        needed = {level for one in _served(options.dir) for level in one.levels}
        for model in before.levels[1:]:
            # Without its metrics it is unknown when the front stops using a level.
            if model not in needed and options.metrics and control.is_ready(model):
                control.unload(model)


def _require_front(control: ModelControl, options: argparse.Namespace) -> None:
    """Raise NotFoundError or InvalidInputError unless the server's front is a cascade that serves the task."""
    if not control.is_ready(options.front):
        raise NotFoundError(f"front: no model {options.front} is ready at {options.url}; name the cascade with --front")
    config = control.config(options.front)
    task = config.get("parameters", {}).get("task", {}).get("string_value")
    served = f"task {task}" if config.get("backend") == "cascade" else f"the backend {config.get('backend')}"
    allowed = f"a cascade that serves task {options.task}; this model has {served}. Name the cascade with --front"
    require(served == f"task {options.task}", "front", options.front, allowed)


def _served(folder: Path) -> list[Candidate]:
    return [candidates.serving(folder, task).candidate for task in candidates.entries(folder)]


def _swaps(options: argparse.Namespace) -> float:
    if not options.metrics:
        return 0.0
    samples = metrics.scrape(options.metrics, tls=tls_from_environment())
    return sum(
        value for (name, labels), value in samples.items() if name == _SWAPS and ("model", options.front) in labels
    )


def _list(options: argparse.Namespace) -> int:
    tasks = candidates.entries(options.dir)
    if not tasks:
        raise NotFoundError(f"no candidates in {options.dir}; run `shapeshift cascade register`")
    for task in tasks:
        serving = candidates.serving(options.dir, task)
        sys.stdout.write(f"task {task}\n")
        _show(serving.table, serving.candidate)
        if options.reliability:
            _plot_reliability(serving.table)
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


def _plot_reliability(table: CandidateTable) -> None:
    """The reliability of each model as bars: # up to its accuracy, | at its confidence."""
    for name, bins in table.origin.get("reliability", {}).items():
        sys.stdout.write(f"  {name}\n  {'confidence':>13} {'texts':>6} {'mean':>6} {'right':>6}\n")
        for one in bins:
            bar = list(f"{'#' * round(_BAR * one['accuracy']):{_BAR + 1}}")
            bar[round(_BAR * one["confidence"])] = "|"
            sys.stdout.write(
                f"  {one['low']:5.2f} to {one['high']:4.2f} {one['count']:6} {one['confidence']:6.3f} "
                f"{one['accuracy']:6.3f} {''.join(bar).rstrip()}\n"
            )
