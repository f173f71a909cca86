"""`make fleet`: three nodes on this machine under lengths that drift; the sidecar's moves as they happen.

The same texts come twice: with the sidecar at work, and with the plan that it has made last, frozen.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.common.output import BUILD, FOLDER, empty
from bench.fleet.member_load import MemberLoad, Result
from bench.polymorph.fleet import emulated_front
from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.supervision.node_supervisor import READY
from shapeshift.fleet.supervision.ray_fleet import SIDECAR, RayFleet
from shapeshift.sidecar import run_files

_WORK_FOLDER = FOLDER / "demonstration"
_NAME, _FRONT, _NODES, _WORKERS = "demonstration", "encode", 3, 4
_FIRST_PORT = 28_000
_FLEET = f"""
name = "{_NAME}"
membership = "ray"

[ray]
nodes = {_NODES}
cpus = 0.5
grpc_port = {_FIRST_PORT}
metrics_port = {_FIRST_PORT + 100}
build = "build"
serve = "--models {_FRONT} --triton {(BUILD / "triton").resolve()}"
"""
_STEP_S, _READY_S = 10.0, 300.0
_SHORT, _LONG = 40, 440


def drifting(seconds: float, per_s: float, seed: int = 0) -> list[tuple[float, int]]:
    """When each text comes, and its tokens: most are short at first, and long at the end."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0 / per_s, round(seconds * per_s)))
    middle = _SHORT + (_LONG - _SHORT) * np.clip(at_s / seconds, 0.0, 1.0)
    tokens = np.clip(middle * rng.lognormal(0.0, 0.3, len(at_s)), 8, 512).astype(int)
    return list(zip(at_s.tolist(), tokens.tolist(), strict=True))


def main() -> int:
    """Start the fleet, send the texts twice, print what happens, and stop the fleet."""
    parser = argparse.ArgumentParser(prog="make fleet", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="of load, each time (%(default)s)")
    parser.add_argument("--per-second", type=float, default=30.0, help="texts a second (%(default)s)")
    options = parser.parse_args()
    empty(_WORK_FOLDER)
    own = {"placement": "partitioned", "workers": _WORKERS, "min_workers": _WORKERS, "max_queue_ms": 0}
    emulated_front(_WORK_FOLDER, _FRONT, [_SHORT], bins="64,128,256,512", **own)
    file = _WORK_FOLDER / "fleet.toml"
    file.write_text(_FLEET)
    fleet = RayFleet(file)
    try:
        _say("starting Ray and three nodes, with emulated workers: they imitate a GPU's latency and compute nothing\n")
        fleet.up(plan_period_s=_STEP_S)
        fleet.wait(fleet.names, READY, _READY_S, _say)
        _show(fleet.home / SIDECAR, options.seconds, options.per_second)
    except ShapeshiftError as error:
        sys.stderr.write(f"make fleet: {error}\n")
        return 2
    finally:
        fleet.down(_READY_S, _say)
    return 0


def _show(sidecar: Path, seconds: float, per_s: float) -> None:
    members = sidecar.parent / "node-0" / "fleet.toml"
    log = sidecar / "sidecar.log"
    run_directory = sidecar / "fleet" / _NAME
    _follow(log, 0, _STEP_S)
    found: dict[str, list[Result]] = {}
    for title in ("the sidecar at work", "its last plan, frozen"):
        if found:
            run_files.freeze(run_directory)
        _say(f"\n{title}: {seconds:g} s, {per_s:g} texts a second, median from {_SHORT} to {_LONG} tokens\n")
        with MemberLoad(members, drifting(seconds, per_s), _FRONT) as load:
            position = log.stat().st_size
            for begin_s, end_s in pairwise(np.arange(0.0, seconds + _STEP_S, _STEP_S).tolist()):
                position = _follow(log, position, _STEP_S)
                _say(f"  {end_s:4.0f} s  {_latency([one for one in load.results if begin_s <= one.began_s < end_s])}\n")
            load.wait()
        found[title] = load.results
    _say("\n")
    for title, results in found.items():
        _say(f"{title:24} {_latency(results)}\n")


def _follow(log: Path, position: int, seconds: float) -> int:
    """Print what is added to the log for so many seconds; returns the position after it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if log.is_file():
            with log.open("rb") as stream:
                stream.seek(position)
                text = stream.read()
            position += len(text)
            _say("".join(f"    sidecar: {line}\n" for line in text.decode(errors="replace").splitlines()))
        time.sleep(0.2)
    return position


def _latency(results: list[Result]) -> str:
    if not results:
        return "no answers"
    took_ms = 1e3 * np.array([one.took_s for one in results])
    failed = sum(bool(one.error) for one in results)
    p98 = float(np.percentile(took_ms, 98))
    return f"{len(results)} texts, {failed} failed, mean {took_ms.mean():.0f} ms, p98 {p98:.0f} ms"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
