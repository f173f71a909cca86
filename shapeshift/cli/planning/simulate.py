"""`shapeshift simulate`: serve a load in simulation, by the policies that serve."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from shapeshift.errors import ShapeshiftError, UnsupportedError
from shapeshift.progress import Progress, say
from shapeshift.settings import require
from shapeshift.simulate import scenario
from shapeshift.simulate.outcome import Outcome
from shapeshift.simulate.scenario import Scenario
from shapeshift.simulate.systems import TextSystem
from shapeshift.table import table
from shapeshift.workloads.load import CSV, Load

# Points of a curve, and the shares of requests between which it is drawn.
_POINTS, _LOW, _HIGH = 60, 0.5, 0.999


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shapeshift simulate`."""
    parser.add_argument("scenario", type=Path, metavar="SCENARIO.toml", help="the load, and what serves it")
    parser.add_argument("--trace", metavar="FILE", help="replay this CSV file instead of [load]")
    parser.add_argument("--seed", type=int, help="of the load, instead of the scenario's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.html", help="draw the latencies")
    parser.add_argument("--live", type=int, metavar="PORT", help="show [polymorph] on a page as a server, until Ctrl-C")
    parser.add_argument("--speed", type=float, default=1.0, help="of the page's clock, up to 10 (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Print what became of the load. Raises ShapeshiftError."""
    load = Load(CSV, trace=options.trace, duration_s=math.inf) if options.trace else None
    case = scenario.read(options.scenario, load)
    if options.seed is not None:
        case = replace(case, seed=scenario.seed_of({"seed": options.seed}))
    if options.live is not None:
        return show(case, options.scenario, options.live, options.speed)
    outcomes = serve(case)
    if options.json:
        sys.stdout.write(json.dumps(as_json(outcomes)) + "\n")
    else:
        sys.stdout.write(as_text(str(options.scenario), outcomes) + "\n")
    if options.plot:
        write_plot(options.plot, outcomes)
    return 0


def show(case: Scenario, file: Path, port: int, speed: float) -> int:
    """Serve the live page of the scenario's own system until a signal stops it. Raises ShapeshiftError."""
    try:
        from shapeshift.cli.planning.live_source import SimulatedSource
        from shapeshift.live.app import make_server
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed: pip install 'shapeshift[live]'") from None
    require(0 < speed <= 10, "--speed", speed, "above 0, at most 10")
    system = next(iter(case.systems.values()))
    if not isinstance(system, TextSystem):
        raise UnsupportedError("--live shows [polymorph]; the other techniques have tables")
    source = SimulatedSource(file.name, system, case.load.draw(case.seed), speed)
    say(f"live page: http://127.0.0.1:{port}/, about the simulation of {file}")
    server = make_server(source, "127.0.0.1", port)
    server.run()
    return 0 if server.started else 1


def serve(case: Scenario) -> dict[str, Outcome]:
    """The outcome of each system, which get the same requests."""
    trace = case.load.draw(case.seed)
    progress = Progress("simulate")
    outcomes = {}
    for name, system in case.systems.items():
        outcomes[name] = system.serve(
            trace,
            lambda done, total, name=name: progress(f"{name}: {done} of {total}"),  # type: ignore[misc]
        )
    progress.done()
    return outcomes


def as_text(title: str, outcomes: Mapping[str, Outcome]) -> str:
    """A row for each system, and below them the plans of each."""
    text = table(title, [{"system": name, **outcome.figures} for name, outcome in outcomes.items()]).strip("\n")
    for name, outcome in outcomes.items():
        for at, words in outcome.plans:
            text += f"\n  {name}, {at:.0f} s: {words}"
    return text


def as_json(outcomes: Mapping[str, Outcome]) -> dict[str, object]:
    """The same as JSON values."""
    return {
        name: {**outcome.figures, "plans": [{"at_s": at, "why": words} for at, words in outcome.plans]}
        for name, outcome in outcomes.items()
    }


def write_plot(file: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Draw the share of requests by latency, of each system, as a page with SVG. Raises ShapeshiftError."""
    # Not before it is needed: other commands need none of it.
    from shapeshift.live import svg

    kinds = ("text-a", "lent", "engine", "many")
    plot = svg.Plot(220, "Latency by share of requests", "to the right: slower; logarithmic")
    shares = np.linspace(_LOW, _HIGH, _POINTS)
    curves = {
        name: np.quantile(answered, shares)
        for name, outcome in outcomes.items()
        if len(answered := outcome.latency_ms[~np.isnan(outcome.latency_ms)])
    }
    low = min((curve[0] for curve in curves.values()), default=1.0)
    high = max((curve[-1] for curve in curves.values()), default=10.0)

    def x(ms: float) -> float:
        return 40 + (svg.WIDTH - 60) * math.log(max(ms, low) / low) / max(math.log(high / low), 1e-9)

    def y(share: float) -> float:
        return 190 - 170 * (share - _LOW) / (_HIGH - _LOW)

    for share in (0.5, 0.75, 0.98):
        plot.line(40, y(share), svg.WIDTH - 20, y(share))
        plot.text(34, y(share) + 4, f"{share:.0%}", "tick", "end")
    for ms in (low, math.sqrt(low * high), high):
        plot.text(x(ms), 208, svg.number(ms, "ms"), "tick", "middle")
    for place, (name, curve) in enumerate(curves.items()):
        kind = kinds[place % len(kinds)]
        for ms, share in zip(curve.tolist(), shares.tolist(), strict=True):
            plot.rect(x(ms) - 1.5, y(share) - 1.5, 3, 3, kind, f"{name}: {share:.1%} within {svg.number(ms, 'ms')}")
        plot.legend((kind, name))
    halves = (f"{name}: half within {svg.number(float(curve[0]), 'ms')}" for name, curve in curves.items())
    plot.description = "; ".join(halves)
    style = Path(svg.__file__).with_name("style.css").read_text(encoding="utf-8")
    try:
        file.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{plot.html()}\n", encoding="utf-8")
    except OSError as error:
        raise ShapeshiftError(f"{file} cannot be written: {error.strerror}") from None
