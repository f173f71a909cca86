"""The drill: a real server under load of all fronts, faults one after another, and what each of them cost.

The answers are known beforehand and each one is checked. The exit status is 1 where a gate is missed: a wrong answer,
a request lost that no killed process held, a time until whole above its bound, processes or shared memory left behind.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import numpy as np

from bench.common.foreign_load import ForeignLoad
from bench.common.output import Output, parser, program
from bench.drill import models, questions
from bench.drill.churn import Churn
from bench.drill.drill import Drill, Result, every_fault, record, rounds, row
from bench.drill.faults import files, resources
from bench.drill.faults.scene import Fault, Scene
from bench.drill.site import Site
from bench.drill.soak import soak
from bench.drill.traffic import TIMEOUT_S, Traffic
from shapeshift.errors import ShapeshiftError

SHARE, SOAK_SHARE = 0.35, 0.7
_MOST_PER_S = 25.0
_READY_S = 300.0
_IN_FLIGHT, _CARRIED_S = 2, 8.0
_WARM_S = 15.0


@program
def main() -> int:
    """Run the drill, print and write its table; 1 where a gate is missed, 2 for an error."""
    parse = parser("drill", __doc__, "about 3 minutes: a few faults, once")
    parse.add_argument("--minutes", type=float, default=30.0, help="begin no round of faults after this (%(default)g)")
    parse.add_argument("--only", metavar="TEXT", help="only the faults whose names contain this, once")
    parse.add_argument("--soak", type=float, metavar="MINUTES", help="no faults: load at 70%% for so long")
    options = parse.parse_args()
    kind = "soak" if options.soak else "drill"
    output = Output("drill", {"seed": options.seed, "time-out of a request": f"{TIMEOUT_S:g} s"}, kind)
    missed = _run(options, output)
    output.say("\nall gates held" if not missed else "\ngates missed:")
    for one in missed:
        output.say(f"  {one}")
    output.data["missed"] = missed
    output.save()
    return int(bool(missed))


def _run(options: argparse.Namespace, output: Output) -> list[str]:
    """The gates missed."""
    models.build()
    clock = models.FOLDER / "clock"
    library, reason = resources.compile_clock(models.FOLDER)
    hang = models.FOLDER / "hang"
    hang.unlink(missing_ok=True)
    environment = {"DRILL_HANG": str(hang.resolve())}
    if not reason:
        resources.set_clock(clock, 0)
        environment |= {"DRILL_CLOCK": str(clock.resolve()), "LD_PRELOAD": str(library.resolve())}
    run_directory = models.FOLDER / "run"
    no_mount = files.mount_run_directory(run_directory)
    for why in filter(None, (reason, no_mount)):
        output.say(f"left out: {why}")
    try:
        began = time.monotonic()
        with Site(environment) as site, ForeignLoad() as foreign:
            site.wait_ready(_READY_S)
            start_s = time.monotonic() - began
            questions_by_front = questions.make(options.seed)
            with Traffic(site.grpc_url, questions_by_front, questions.judge(), options.seed) as traffic:
                left = traffic.learn()
                carried = traffic.carried(_IN_FLIGHT, _CARRIED_S)
                share = SOAK_SHARE if options.soak else SHARE
                rates = {front: min(_MOST_PER_S, share * rate) for front, rate in carried.items()}
                output.say(f"\nserver ready after {start_s:.0f} s; {sum(left.values())} questions with known answers")
                output.say(f"{share:.0%} of what it carries, requests/s: {_listed(rates)}")
                scene = Scene(
                    site=site,
                    traffic=traffic,
                    carried=carried,
                    rng=np.random.default_rng(options.seed),
                    say=lambda text: output.say(f"{time.monotonic() - began:8.1f} s  {text}"),
                    hang=hang,
                    clock=clock,
                    clients=100 if options.quick else 1000,
                )
                missed = _measure(options, output, scene, rates, start_s)
        output.say(f"other processes used {foreign.cores:.2f} cores meanwhile")
        return missed
    finally:
        files.keep_logs(run_directory, models.FOLDER / "logs")
        files.unmount_run_directory(run_directory)


def _measure(
    options: argparse.Namespace, output: Output, scene: Scene, rates: dict[str, float], start_s: float
) -> list[str]:
    if options.soak:
        return list(soak(scene, rates, options.soak, output.say, output.data))
    drill = Drill(scene, rates, start_s)
    scene.traffic.resume(rates)
    time.sleep(_WARM_S)
    drill.calm += scene.traffic.outcomes
    scene.traffic.pause()
    results: list[Result] = []
    with Churn(scene.traffic) as churn:
        for result in drill.run(_faults(options, scene.rng)):
            results.append(result)
            scene.say(", ".join(f"{name} {value}" for name, value in row(result).items() if value))
    output.table("faults; what stays behind is on the right", [row(result) for result in results])
    output.say(f"registries changed {churn.changes} times meanwhile; refused: {len(churn.failed)}")
    output.say(f"`serve` started {scene.site.starts} times")
    output.data |= {"results": [record(one) for one in results], "churn_failed": churn.failed}
    return [f"{result.name}: {line}" for result in results for line in result.missed]


def _faults(options: argparse.Namespace, rng: np.random.Generator) -> Iterator[Fault]:
    """The faults of the run, in their order."""
    end = time.monotonic() + 60.0 * options.minutes
    faults = [fault for fault in every_fault(options.quick) if not options.only or options.only in fault.name]
    if not faults:
        raise ShapeshiftError(f"no fault with {options.only!r} in its name")
    for order in rounds(faults, rng):
        for fault in order:
            if time.monotonic() > end:
                return
            yield fault
        if options.quick or options.only:
            return


def _listed(rates: dict[str, float]) -> str:
    return ", ".join(f"{front} {rate:.1f}" for front, rate in rates.items())


if __name__ == "__main__":
    sys.exit(main())
