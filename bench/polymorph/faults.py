"""What faults cost under a steady load: reallocations, and kills of a worker, the front or the scheduler."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.polymorph.emulated_server import SLO_MS, WORK_FOLDER, edges
from bench.polymorph.fleet import Fleet, emulated_front, read_curve, running_fleet
from bench.polymorph.traces import Traffic, capacity_per_s, draw, planned
from client.open_loop import replay
from client.report import Report
from shapeshift.triton.control import ModelControl
from shapeshift.triton.embedded.processes import look_up
from shapeshift.workloads import lengths

FRONT = "faulty"
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Fault:
    """Requests under one fault: how many failed, and their latency.

    noticed_s, recovered_s: from the fault until the front has fewer workers, and all again; NaN where it never had
    fewer. load_s: time to load one worker again.
    """

    name: str
    requests: int
    failed: int
    worst_s: float
    median_s: float
    noticed_s: float
    recovered_s: float
    load_s: float
    errors: tuple[str, ...]


class FaultBench:
    """A front and its workers under a steady load, into which faults are injected.

    bins: the edges of its workers' bins; per_s: texts a second.
    """

    def __init__(self, running: Fleet, front: str, bins: Sequence[int], workers: int, per_s: float, seed: int) -> None:
        self._running, self._front, self._bins, self._workers = running, front, tuple(bins), workers
        self._per_s, self._seed = per_s, seed

    def during(self, name: str, duration_s: float, inject: Callable[[], None], at_s: float = 4.0) -> Fault:
        """Run the load for `duration_s`, inject the fault at `at_s`, and watch until all workers have joined again."""
        traffic = Traffic(1.0, drift=0.0, duration_s=duration_s)
        instants, tokens = draw(traffic, self._per_s, self._seed)
        requests = planned(instants, tokens, self._seed)
        seen: list[float] = []
        watcher = threading.Thread(target=self._watch, args=(at_s, inject, seen, duration_s))
        watcher.start()
        report = asyncio.run(replay(self._running.server.grpc_url, self._front, requests, timeout_s=_TIMEOUT_S))
        watcher.join()
        return self._fault(name, report, seen)

    def reallocations(self, count: int, duration_s: float) -> Fault:
        """Change the bins of workers `count` times under load: pairs of workers exchange bins, the growing one first.

        Each bin keeps the capacity that the plan gives it, and, as in every plan, one worker has the longest bin.
        """
        key = (self._running.run_directory / "key").read_text().strip()

        def exchange_bins() -> None:
            with ModelControl(self._running.server.grpc_url, key) as control:
                names = [f"{self._front}_w{number:02d}" for number in range(self._workers)]
                bins = {name: _bin(control.config(name)) for name in names}
                pairs = itertools.cycle(
                    itertools.permutations([name for name in names if bins[name] < max(bins.values())], 2)
                )
                for _ in range(count // 2):
                    short, long = next(pair for pair in pairs if bins[pair[0]] < bins[pair[1]])
                    bins[short], bins[long] = bins[long], bins[short]
                    for name in (short, long):
                        config = control.config(name)
                        config["parameters"]["bin"]["string_value"] = str(bins[name])
                        control.load(name, config)

        return self.during(f"{count} reallocations", duration_s, exchange_bins)

    def kill(self, model: str) -> None:
        """Send SIGKILL to the process of a model."""
        pids = [
            dict(labels)["pid"]
            for (name, labels), _ in self._running.samples().items()
            if name == "shapeshift_heartbeat_total" and dict(labels)["model"] == model
        ]
        for pid in pids:
            if look_up(int(pid)):
                os.kill(int(pid), signal.SIGKILL)

    def _joined(self) -> float:
        now = [
            (labels, value)
            for (name, labels), value in self._running.samples().items()
            if name == "shapeshift_workers_joined" and look_up(int(dict(labels)["pid"]))
        ]
        return max((value for _, value in now), default=0.0)

    def _watch(self, at_s: float, inject: Callable[[], None], seen: list[float], duration_s: float) -> None:
        time.sleep(at_s)
        began = time.monotonic()
        inject()
        down = False
        while time.monotonic() - began < duration_s:
            joined = self._joined()
            if not down and joined < self._workers:
                down = True
                seen.append(time.monotonic() - began)
            elif down and joined >= self._workers:
                seen.append(time.monotonic() - began)
                return
            time.sleep(0.1)

    def _fault(self, name: str, report: Report, seen: list[float]) -> Fault:
        latency = report.latency_s[report.ok]
        noticed_s, recovered_s = (*seen, float("nan"), float("nan"))[:2]
        return Fault(
            name=name,
            requests=len(report.ok),
            failed=int((~report.ok).sum()),
            worst_s=float(latency.max()),
            median_s=float(np.median(latency)),
            noticed_s=noticed_s,
            recovered_s=recovered_s,
            load_s=self._load_time(),
            errors=tuple(f"{kind}: {text}" for kind, text in report.messages.items()),
        )

    def _load_time(self) -> float:
        key = (self._running.run_directory / "key").read_text().strip()
        with ModelControl(self._running.server.grpc_url, key) as control:
            name = f"{self._front}_w00"
            config = control.config(name)
            generation = int(config["parameters"]["generation"]["string_value"])
            config["parameters"]["generation"]["string_value"] = str(generation + 1)
            before = time.monotonic()
            control.load(name, config)
            return time.monotonic() - before


def _bin(config: Mapping[str, Any]) -> int:
    return int(config["parameters"]["bin"]["string_value"])


def measure(
    placement: str, workers: int, load: float, seed: int, reallocations: int, requests: int, everything: bool
) -> Iterator[Fault]:
    """The faults of the table, one after another on one server.

    requests: at least so many during the reallocations. everything: front and scheduler are killed as well.
    """
    folder = WORK_FOLDER / "faults"
    shutil.rmtree(folder, ignore_errors=True)
    stated = {
        "bins": ",".join(map(str, edges())),
        "slo_ms": f"{SLO_MS:g}",
        "placement": placement,
        "workers": workers,
        "min_workers": workers,
    }
    law = lengths.long().sample(np.random.default_rng(seed), 20000)
    repository = emulated_front(folder, FRONT, law.tolist(), **stated)
    with running_fleet(folder, (repository,), {FRONT: workers}, 600.0) as running:
        per_s = capacity_per_s(read_curve(), edges(), workers) * load
        faults = FaultBench(running, FRONT, edges(), workers, per_s, seed)
        if reallocations:
            yield faults.reallocations(reallocations, max(requests / per_s, 4.0 + 4.0 * reallocations))
        yield faults.during("a worker killed", 25.0, lambda: faults.kill(f"{FRONT}_w00"))
        if not everything:
            return
        yield faults.during("the front killed", 30.0, lambda: faults.kill(FRONT))

        def restart_scheduler() -> None:
            running.schedulers[-1].kill()
            running.schedulers[-1].wait()
            # As `shapeshift serve` does.
            running.start_scheduler()

        def both() -> None:
            faults.kill(FRONT)
            restart_scheduler()

        yield faults.during("the scheduler killed", 10.0, restart_scheduler)
        yield faults.during("front and scheduler killed", 40.0, both)


def lines(faults: list[Fault]) -> Iterator[str]:
    """The table."""
    yield (
        f"  {'':30}{'requests':>9}{'failed':>7}{'median s':>9}{'worst s':>9}{'noticed s':>11}{'recovered s':>13}"
        f"{'load s':>8}"
    )
    for fault in faults:
        yield (
            f"  {fault.name:30}{fault.requests:9}{fault.failed:7}{fault.median_s:9.3f}{fault.worst_s:9.2f}"
            f"{fault.noticed_s:11.1f}{fault.recovered_s:13.1f}{fault.load_s:8.1f}"
        )
        yield from (f"    {error}" for error in fault.errors)
