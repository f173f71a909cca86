"""The sidecar: the health loop and the plan loop, each in a thread of its own, so that no load holds up the watch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from shapeshift.scheduler import folders, freeze, plan, report
from shapeshift.scheduler.actuate import Actuator
from shapeshift.scheduler.fleet import FleetReader
from shapeshift.scheduler.journal import Journal, Write
from shapeshift.scheduler.settings import SchedulerSettings
from shapeshift.scheduler.sight import Sight
from shapeshift.scheduler.steer import Steer
from shapeshift.scheduler.watch import Watch
from shapeshift.triton import metrics, processes, record
from shapeshift.triton.control import ModelControl

# How soon an absent server is looked for again.
_SOON_S = 0.25
_END_S = 0.5


class Sidecar:
    """Works from `start` to `stop`; `write` takes what it says, line by line, from several threads."""

    def __init__(self, settings: SchedulerSettings, key: str, write: Write) -> None:
        self._settings = settings
        about = {"pid": os.getpid(), "server": settings.server, "settled": False, "frozen": False}
        self._journal = Journal(write, self._publish, about)
        control = ModelControl(settings.server, key)
        actuator = Actuator(control, settings.repositories, self._journal, self._held, settings.load_timeout_s)
        scrape = partial(metrics.scrape, settings.metrics)
        self._watch = Watch(scrape, control, actuator, self._journal, Sight(_is_local(settings)))
        self._steer = Steer(settings, FleetReader(control), actuator, self._journal, lambda: self._watch.page)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, args=(self._look,), name="health", daemon=True),
            threading.Thread(target=self._loop, args=(self._decide, self._warm_up), name="plan", daemon=True),
        ]

    def start(self) -> None:
        """Start both loops."""
        about = " (dry run: nothing is done)" if self._settings.dry_run else ""
        self._journal.event("start", "scheduler", f"process {os.getpid()}, server {self._settings.server}{about}")
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both loops; a load that runs is not waited for, the server finishes it."""
        self._stop.set()
        self._watch.close()
        for thread in self._threads:
            thread.join(_END_S)

    def _loop(self, *steps: Callable[[], float]) -> None:
        """The last step is done once, the first one then for ever, each after the pause that the one before wants."""
        step = steps[-1]
        while True:
            try:
                pause = step()
            except Exception as error:  # noqa: BLE001  one bad step must end neither loop
                self._journal.say("error", step.__name__, repr(error))
                pause = self._settings.health_period_s
            step = steps[0]
            if self._stop.wait(pause):
                return

    def _look(self) -> float:
        self._watch.step()
        return self._settings.health_period_s

    def _warm_up(self) -> float:
        # The solver takes a second to load; the server is starting meanwhile.
        if folders.models(self._settings.repositories)[1]:
            plan.warm_up()
        return 0.0

    def _decide(self) -> float:
        self._journal.about(frozen=freeze.is_frozen(self._settings.run_directory))
        expected = self._steer.step()
        if expected is None:
            return min(_SOON_S, self._settings.health_period_s)
        self._watch.expected = expected
        self._journal.about(settled=True)
        return self._settings.health_period_s

    def _held(self) -> str:
        if self._settings.dry_run:
            return "dry run"
        return "frozen" if freeze.is_frozen(self._settings.run_directory) else ""

    def _publish(self, values: dict[str, Any]) -> None:
        if not self._settings.dry_run:
            # The report is for readers only: without it the work goes on.
            with contextlib.suppress(OSError):
                report.write(self._settings.run_directory, values)


def _is_local(settings: SchedulerSettings) -> bool:
    """Whether the run directory's own server is the one that is watched, so that its processes can be seen."""
    running = record.read(settings.run_directory / "server.json")
    if running is None or not processes.is_alive(running.server):
        return False
    return settings.server.endswith(f":{running.about.get('ports', {}).get('grpc')}")
