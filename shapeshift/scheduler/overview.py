"""What is served now, read from the server, its metrics and the sidecar's last report; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapeshift.scheduler import freeze, lock, observe, report
from shapeshift.scheduler.fleet import READY, Control, Fleet, FleetReader
from shapeshift.scheduler.observe import Load, Page
from shapeshift.scheduler.sight import Fate, Sight
from shapeshift.triton.metrics import Samples


def overview(
    control: Control, scrape: Callable[[], Samples], run_directory: Path, sight: Sight, seconds: float
) -> dict[str, Any]:
    """Fronts, workers, plans and sidecar, with the load of the next `seconds`. Also without any sidecar.

    Raises ShapeshiftError where the server or its metrics do not answer.
    """
    old = Page(scrape(), time.monotonic())
    time.sleep(seconds)
    new = Page(scrape(), time.monotonic())
    fleet = FleetReader(control).read()
    loads = {model: observe.load(model, old, new) for model in {*fleet.fronts, *fleet.states}}
    said = report.read(run_directory)
    workers = {name for found in fleet.workers.values() for name in (worker.name for worker in found)}
    others = [name for name, state in fleet.states.items() if state == READY and name not in workers]
    return {
        "scheduler": {
            "pid": lock.holder(run_directory),
            "frozen": freeze.is_frozen(run_directory),
            "decisions": said.get("decisions", [])[-5:],
        },
        "fronts": [_front(name, fleet, loads[name], new, sight, said) for name in fleet.fronts],
        "workers": _workers(fleet, loads, new, sight),
        "models": [
            {"name": name, **_process(name, loads[name], new, sight)} for name in others if name not in fleet.fronts
        ],
        "problems": dict(fleet.problems),
    }


def _front(name: str, fleet: Fleet, load: Load, page: Page, sight: Sight, said: dict[str, Any]) -> dict[str, Any]:
    own = fleet.fronts[name].settings
    return {
        "name": name,
        **_process(name, load, page, sight),
        "placement": own.placement,
        "placement_reason": fleet.fronts[name].reason,
        "slo_ms": own.slo_ms,
        "pool": own.worker_pool,
        "workers": sum(worker.is_ready for worker in fleet.workers.get(name, ())),
        "texts_per_s": round(load.offered / load.seconds, 2),
        "requests_per_s": round(load.answered / load.seconds, 2),
        "p98_ms": None if load.p98_ms is None else round(load.p98_ms, 2),
        "waiting": int(load.waiting),
        "running": int(load.running),
        "plan": said.get("plans", {}).get(name),
    }


def _workers(fleet: Fleet, loads: dict[str, Load], page: Page, sight: Sight) -> list[dict[str, Any]]:
    rows = []
    for front, workers in fleet.workers.items():
        for worker in workers:
            process = _process(worker.name, loads[worker.name], page, sight)
            rows.append(
                {
                    "name": worker.name,
                    "front": front,
                    "state": process["state"] if worker.is_ready else worker.state.lower() or "not loaded",
                    "pid": process["pid"] if worker.is_ready else None,
                    "bin": worker.bin if worker.is_ready else None,
                    "generation": worker.generation,
                    "outstanding": loads[front].outstanding.get(worker.name, 0),
                    "timeouts": loads[front].timeouts.get(worker.name, 0),
                }
            )
    return rows


def _process(model: str, load: Load, page: Page, sight: Sight) -> dict[str, Any]:
    """The process of a loaded model, and whether it serves, is silent, or is known to be dead."""
    beating = sorted(load.live)
    if beating:
        return {"state": "serving", "pid": beating[-1]}
    known = [one.pid for one in page.series(model, observe.HEARTBEAT)]
    if not known:
        return {"state": "no heartbeat", "pid": None}
    dead = all(sight.fate(pid) in (Fate.ENDED, Fate.ABSENT) for pid in known)
    return {"state": "dead" if dead else "silent", "pid": known[-1]}
