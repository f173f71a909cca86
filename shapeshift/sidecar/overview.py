"""What a server serves now, from its models, its metrics and the sidecar's report; changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shapeshift.sidecar import observe, run_files
from shapeshift.sidecar.front_config import Front
from shapeshift.sidecar.observe import MetricsPage, Traffic, own_pid
from shapeshift.sidecar.servers import Servers
from shapeshift.sidecar.workers import READY, UNLOADED, ServerModels
from shapeshift.triton.embedded.process_tracker import ProcessState, ProcessTracker
from shapeshift.triton.names import split


def overview(
    servers: Servers,
    run_directory: Path,
    processes: ProcessTracker,
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Nodes, fronts, workers, plans and sidecar, with the traffic of the next `seconds`. Needs no sidecar.

    unloaded: models that nobody wants to be loaded, other than those that the sidecar is about to load again.

    Raises ShapeshiftError if no server or no metrics page answers.
    """
    old = servers.scrape()
    sleep(seconds)
    new = servers.scrape()
    server = servers.reader.read()
    traffic = {model: observe.traffic_of([model], old, new) for model in server.states}
    report = run_files.read_report(run_directory)
    in_tables = {worker.name for workers in server.workers.values() for worker in workers}
    in_tables.update(model for front in server.fronts.values() for model in front.models)
    others = [name for name, state in server.states.items() if state == READY and name not in in_tables]
    owed = run_files.OwedLoads(run_directory / run_files.OWED_FILE).names()
    unloaded = [name for name, state in server.states.items() if state in UNLOADED and name not in owed]
    fronts = {
        name: _front(front, server, observe.traffic_of(front.models, old, new), traffic, new, processes, report)
        for name, front in server.fronts.items()
    }
    return {
        "sidecar": {
            "pid": run_files.lock_holder(run_directory),
            "frozen": run_files.is_frozen(run_directory),
            "decisions": report.get("decisions", [])[-5:],
        },
        "nodes": _nodes(servers, server, traffic),
        "fronts": list(fronts.values()),
        "workers": _workers(server, traffic, fronts, new, processes),
        "models": [{"name": name, **_process(name, traffic[name], new, processes)} for name in others],
        "unloaded": unloaded,
        "problems": dict(server.problems),
    }


def _nodes(servers: Servers, server: ServerModels, traffic: dict[str, Traffic]) -> list[dict[str, Any]]:
    """One row for each node: whether it answers, its version, its loaded workers, and the texts that arrive there."""
    versions, problems = servers.versions()
    ready = Counter(split(one.name)[0] for workers in server.workers.values() for one in workers if one.is_ready)
    arrived: dict[str, float] = {}
    for model, seen in traffic.items():
        node = split(model)[0]
        arrived[node] = arrived.get(node, 0.0) + seen.offered / seen.seconds
    return [
        {
            "name": name,
            "state": "serving" if name in server.nodes and name in versions else "does not answer",
            "problem": problems.get(name, ""),
            "version": versions.get(name),
            "workers": ready[name],
            "texts_per_s": round(arrived.get(name, 0.0), 2),
        }
        for name in sorted({*versions, *problems})
    ]


def _front(
    front: Front,
    server: ServerModels,
    traffic: Traffic,
    of_model: dict[str, Traffic],
    page: MetricsPage,
    processes: ProcessTracker,
    report: dict[str, Any],
) -> dict[str, Any]:
    rows = [{"name": model, **_process(model, of_model[model], page, processes)} for model in front.models]
    return {
        "name": front.name,
        "state": ", ".join(dict.fromkeys(one["state"] for one in rows)),
        "pid": rows[0]["pid"] if len(rows) == 1 else None,
        "models": rows,
        "placement": front.settings.placement,
        "placement_reason": front.placement_reason,
        "slo_ms": front.settings.slo_ms,
        "workers": sum(worker.is_ready for worker in server.workers.get(front.name, ())),
        "texts_per_s": round(traffic.offered / traffic.seconds, 2),
        "requests_per_s": round(traffic.answered / traffic.seconds, 2),
        "p98_ms": None if traffic.p98_ms is None else round(traffic.p98_ms, 2),
        "waiting": int(traffic.waiting),
        "running": int(traffic.running),
        "outstanding": dict(traffic.outstanding),
        "timeouts": dict(traffic.timeouts),
        "plan": report.get("plans", {}).get(front.name),
    }


def _workers(
    server: ServerModels,
    traffic: dict[str, Traffic],
    fronts: dict[str, dict[str, Any]],
    page: MetricsPage,
    processes: ProcessTracker,
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
                    "outstanding": fronts[front]["outstanding"].get(worker.name, 0),
                    "timeouts": fronts[front]["timeouts"].get(worker.name, 0),
                    "work": process.get("work", {}) if worker.is_ready else {},
                }
            )
    return rows


def _process(model: str, traffic: Traffic, page: MetricsPage, processes: ProcessTracker) -> dict[str, Any]:
    """Pid and state of a loaded model's process: serving, silent, dead or no heartbeat."""
    live = sorted(traffic.live_pids)
    if live:
        work = observe.work_of(page, model, live)
        return {"state": "serving", "pid": own_pid(live[-1]), "work": work}
    pids = [series.pid for series in page.series(model, observe.HEARTBEAT)]
    if not pids:
        return {"state": "no heartbeat", "pid": None}
    dead = all(processes.state(pid) in (ProcessState.ENDED, ProcessState.ABSENT) for pid in pids)
    return {"state": "dead" if dead else "silent", "pid": own_pid(pids[-1])}
