"""What a server serves now, from its models, its metrics and the sidecar's report; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapeshift.sidecar import observe, run_files
from shapeshift.sidecar.observe import MetricsPage, Traffic
from shapeshift.sidecar.process_tracker import ProcessState, ProcessTracker
from shapeshift.sidecar.workers import READY, Control, ServerModelReader, ServerModels
from shapeshift.triton.metrics import Samples


def overview(
    control: Control, scrape: Callable[[], Samples], run_directory: Path, processes: ProcessTracker, seconds: float
) -> dict[str, Any]:
    """Fronts, workers, plans and sidecar, with the traffic of the next `seconds`. Needs no sidecar.

    Raises ShapeshiftError if the server or its metrics page does not answer.
    """
    old = MetricsPage(scrape(), time.monotonic())
    time.sleep(seconds)
    new = MetricsPage(scrape(), time.monotonic())
    server = ServerModelReader(control).read()
    traffic = {model: observe.traffic_of(model, old, new) for model in {*server.fronts, *server.states}}
    report = run_files.read_report(run_directory)
    workers = {worker.name for found in server.workers.values() for worker in found}
    others = [
        name
        for name, state in server.states.items()
        if state == READY and name not in workers and name not in server.fronts
    ]
    return {
        "scheduler": {
            "pid": run_files.lock_holder(run_directory),
            "frozen": run_files.is_frozen(run_directory),
            "decisions": report.get("decisions", [])[-5:],
        },
        "fronts": [_front(name, server, traffic[name], new, processes, report) for name in server.fronts],
        "workers": _workers(server, traffic, new, processes),
        "models": [{"name": name, **_process(name, traffic[name], new, processes)} for name in others],
        "problems": dict(server.problems),
    }


def _front(
    name: str,
    server: ServerModels,
    traffic: Traffic,
    page: MetricsPage,
    processes: ProcessTracker,
    report: dict[str, Any],
) -> dict[str, Any]:
    front = server.fronts[name]
    return {
        "name": name,
        **_process(name, traffic, page, processes),
        "placement": front.settings.placement,
        "placement_reason": front.placement_reason,
        "slo_ms": front.settings.slo_ms,
        "pool": front.settings.worker_pool,
        "workers": sum(worker.is_ready for worker in server.workers.get(name, ())),
        "texts_per_s": round(traffic.offered / traffic.seconds, 2),
        "requests_per_s": round(traffic.answered / traffic.seconds, 2),
        "p98_ms": None if traffic.p98_ms is None else round(traffic.p98_ms, 2),
        "waiting": int(traffic.waiting),
        "running": int(traffic.running),
        "plan": report.get("plans", {}).get(name),
    }


def _workers(
    server: ServerModels, traffic: dict[str, Traffic], page: MetricsPage, processes: ProcessTracker
) -> list[dict[str, Any]]:
    rows = []
    for front, workers in server.workers.items():
        for worker in workers:
            process = _process(worker.name, traffic[worker.name], page, processes)
            rows.append(
                {
                    "name": worker.name,
                    "front": front,
                    "state": process["state"] if worker.is_ready else worker.state.lower() or "not loaded",
                    "pid": process["pid"] if worker.is_ready else None,
                    "bin": worker.bin if worker.is_ready else None,
                    "generation": worker.generation,
                    "outstanding": traffic[front].outstanding.get(worker.name, 0),
                    "timeouts": traffic[front].timeouts.get(worker.name, 0),
                }
            )
    return rows


def _process(model: str, traffic: Traffic, page: MetricsPage, processes: ProcessTracker) -> dict[str, Any]:
    """Pid and state of a loaded model's process: serving, silent, dead or no heartbeat."""
    live = sorted(traffic.live_pids)
    if live:
        return {"state": "serving", "pid": live[-1]}
    pids = [series.pid for series in page.series(model, observe.HEARTBEAT)]
    if not pids:
        return {"state": "no heartbeat", "pid": None}
    dead = all(processes.state(pid) in (ProcessState.ENDED, ProcessState.ABSENT) for pid in pids)
    return {"state": "dead" if dead else "silent", "pid": pids[-1]}
