"""Demonstration: three nodes on this machine under lengths that drift; the sidecar's moves as they happen.

The same texts come twice: with the first plan, which fits their first tenth and stays, and with the sidecar at work.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.common.output import FOLDER, empty
from bench.fleet.member_load import MemberLoad, Result
from bench.fleet.on_ray import fleet_file, workers_joined
from bench.polymorph.fleet import emulated_front
from shapeshift.errors import ShapeshiftError, TimedOutError
from shapeshift.fleet.supervision.node_supervisor import READY
from shapeshift.fleet.supervision.plan import SIDECAR
from shapeshift.fleet.supervision.ray_fleet import RayFleet
from shapeshift.sidecar import run_files

_WORK_FOLDER = FOLDER / "demonstration"
_NAME, _FRONT, _NODES, _WORKERS = "demonstration", "encode", 3, 4
_FIRST_PORT = 28_000
_STEP_S, _READY_S, _LINE = 10.0, 300.0, 200
_SHORT, _LONG, _SLO_MS = 60, 240, 450


def drifting(seconds: float, per_s: float, seed: int = 0) -> list[tuple[float, int]]:
    """When each text comes, and its tokens: most are short at first, and long at the end."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0 / per_s, round(seconds * per_s)))
    middle = _SHORT + (_LONG - _SHORT) * np.clip(at_s / seconds, 0.0, 1.0)
    tokens = np.clip(middle * rng.lognormal(0.0, 0.3, len(at_s)), 8, 512).astype(int)
    return list(zip(at_s.tolist(), tokens.tolist(), strict=True))


def main() -> int:
    """Start the fleet, send the texts twice, print what happens, and stop the fleet."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.demonstration", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="of load, each time (%(default)s)")
    parser.add_argument("--per-second", type=float, default=30.0, help="texts a second (%(default)s)")
    options = parser.parse_args()
    empty(_WORK_FOLDER)
    trace = drifting(options.seconds, options.per_second)
    settings = {"workers": _WORKERS, "min_workers": _WORKERS, "max_queue_ms": 0, "slo_ms": _SLO_MS}
    first = [tokens for _, tokens in trace[: len(trace) // 10]]
    emulated_front(_WORK_FOLDER, _FRONT, first, bins="64,128,256,512", **settings)
    file = _WORK_FOLDER / "fleet.toml"
    file.write_text(fleet_file(_NAME, _FRONT, _NODES, _FIRST_PORT))
    fleet = RayFleet(file)
    try:
        _say("starting Ray and three nodes, with emulated workers: they imitate a GPU's latency and compute nothing\n")
        fleet.up(plan_period_s=_STEP_S)
        fleet.wait(fleet.names, READY, _READY_S, _say)
        _show(fleet, trace)
    except ShapeshiftError as error:
        sys.stderr.write(f"bench.fleet.demonstration: {error}\n")
        return 2
    finally:
        fleet.down(_READY_S, _say)
    return 0


def _show(fleet: RayFleet, trace: list[tuple[float, int]]) -> None:
    sidecar = fleet.home / SIDECAR
    log, run_directory = _Log(sidecar / "sidecar.log"), sidecar / "fleet" / _NAME
    _wait_for_workers(fleet, log)
    results_by_plan: dict[str, list[Result]] = {}
    for title, change in (("the first plan, frozen", run_files.freeze), ("the sidecar at work", run_files.thaw)):
        change(run_directory)
        seconds = trace[-1][0]
        _say(f"\n{title}: {len(trace)} texts in {seconds:.0f} s, median from {_SHORT} to {_LONG} tokens\n")
        with MemberLoad(fleet.home / "node-0" / "fleet.toml", trace, _FRONT) as load:
            for begin_s, end_s in pairwise(np.arange(0.0, seconds + _STEP_S, _STEP_S).tolist()):
                log.follow(_STEP_S)
                sent = sum(begin_s <= at_s < end_s for at_s, _ in trace)
                answered = [one for one in load.results if begin_s <= one.began_s < end_s]
                _say(f"  {end_s:4.0f} s  of {sent} texts until now: {_latency(answered)}\n")
            load.wait()
        log.follow(0.0)
        results_by_plan[title] = load.results
    _say("\n")
    for title, results in results_by_plan.items():
        _say(f"{title:24} {_latency(results)}\n")


def _wait_for_workers(fleet: RayFleet, log: _Log) -> None:
    """Until the front of each node sends texts to the workers of all nodes."""
    workers, deadline = float(_NODES * _WORKERS), time.monotonic() + _READY_S
    while any(workers_joined(fleet, name, _FRONT) != workers for name in fleet.names):
        if time.monotonic() > deadline:
            raise TimedOutError(f"the fronts have not {workers:g} workers after {_READY_S:g} s")
        log.follow(1.0)


class _Log:
    """Prints what is added to the log of the sidecar."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0

    def follow(self, seconds: float) -> None:
        """Print what is added for so many seconds, each line shortened, without its date."""
        deadline = time.monotonic() + seconds
        while True:
            if self._path.is_file():
                with self._path.open("rb") as stream:
                    stream.seek(self._position)
                    text = stream.read()
                self._position += len(text)
                for line in text.decode(errors="replace").splitlines():
                    _say(f"    {textwrap.shorten(line.partition('T')[2], _LINE, placeholder=' ...')}\n")
            if time.monotonic() >= deadline:
                return
            time.sleep(0.2)


def _latency(results: list[Result]) -> str:
    if not results:
        return "no answers"
    took_ms = 1e3 * np.array([one.took_s for one in results])
    failed = sum(bool(one.error) for one in results)
    p98 = float(np.percentile(took_ms, 98))
    return f"{len(results) - failed} answered, {failed} failed, mean {took_ms.mean():.0f} ms, p98 {p98:.0f} ms"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
