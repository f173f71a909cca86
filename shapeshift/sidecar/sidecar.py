"""The sidecar: a health loop, a plan loop and one that checks answers, each in its own thread.

So no load delays the health checks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from shapeshift.loops import Loop
from shapeshift.sidecar import run_files
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.answers import AnswerCheck
from shapeshift.sidecar.health_loop import HealthLoop
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.plan_loop import PlanLoop
from shapeshift.sidecar.policy import plan
from shapeshift.sidecar.run_files import OwedLoads
from shapeshift.sidecar.servers import Servers
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.sidecar.watch_all import WatchAll
from shapeshift.triton.embedded.process_tracker import ProcessTracker

# Seconds between two scrapes: models of ours beat once a second.
_PERIOD_S = 1.0
# Pause before the next attempt while no server answers.
_RETRY_S = 0.25
_JOIN_S = 0.5


class Sidecar:
    """Works from `start` to `stop`. connect: opens the connections to the servers, and logs what is wrong with them.

    watched: their kind and name, such as `server 127.0.0.1:8001`. is_local: whether their processes are visible here.
    port: of gRPC of a server on this machine.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        connect: Callable[[Journal], Servers],
        watched: str,
        is_local: bool = False,
        port: int | None = None,
    ) -> None:
        self._settings = settings
        self._watched = watched
        kind, _, name = watched.partition(" ")
        status = {"pid": os.getpid(), "settled": None, "frozen": False, kind: name}
        self._journal = Journal(logging.getLogger("shapeshift.sidecar"), self._write_report, status)
        owed = OwedLoads(None if settings.dry_run else settings.run_directory / run_files.OWED_FILE)
        servers = connect(self._journal)
        actuator = Actuator(servers.control, settings.repositories, self._journal, self._blocked, owed)
        processes = ProcessTracker(is_local)
        others = WatchAll(settings, servers.control, actuator.backoff, self._journal, port)
        self._health = HealthLoop(
            *(servers.scrape, servers.control, actuator, self._journal, processes),
            others=others if settings.watch_all else None,
        )
        self._plan = PlanLoop(settings, servers.reader, actuator, self._journal, lambda: self._health.page)
        self._has_solver = False
        log = partial(self._journal.log, "error", "sidecar", level=logging.ERROR)
        self._loops = [
            Loop("health", self._check_health, log, self._health.wait),
            Loop("plan", self._make_plan, log),
        ]
        if servers.ask is not None and settings.check_seconds:
            self._answers = AnswerCheck(settings, servers.control, servers.ask, actuator, self._journal)
            self._loops.append(Loop("answers", self._check_answers, log))

    def start(self) -> None:
        """Start the loops."""
        mode = " (dry run: no change is applied)" if self._settings.dry_run else ""
        self._journal.log("start", "sidecar", f"process {os.getpid()}, {self._watched}{mode}")
        for loop in self._loops:
            loop.start()

    def stop(self) -> None:
        """End the loops. Does not wait for a running load; the server completes it."""
        for loop in self._loops:
            loop.stopped.set()
        self._health.close()
        for loop in self._loops:
            loop.stop(_JOIN_S)

    def _check_health(self) -> float:
        self._health.step()
        return _PERIOD_S

    def _check_answers(self) -> float:
        if self._health.page is not None:
            self._answers.step(self._health.page)
        return _PERIOD_S

    def _make_plan(self) -> float:
        self._journal.update_status(frozen=run_files.is_frozen(self._settings.run_directory))
        expected = self._plan.step()
        if expected is None:
            self._load_solver()
            return _RETRY_S
        self._health.expected = expected
        self._journal.update_status(settled=sorted(expected))
        return _PERIOD_S

    def _load_solver(self) -> None:
        # It takes a second of the processor. A server that serves needs that more, and its plan may stay as it is.
        # The nodes of a fleet may have repositories of their own.
        repositories = self._settings.repositories
        has_workers = not repositories or run_files.repository_models(repositories)[1]
        if has_workers and not self._has_solver:
            plan.warm_up()
            self._has_solver = True

    def _blocked(self) -> str:
        if self._settings.dry_run:
            return "dry run"
        return "frozen" if run_files.is_frozen(self._settings.run_directory) else ""

    def _write_report(self, values: dict[str, Any]) -> None:
        if not self._settings.dry_run:
            # The report is only for readers; the sidecar works without it.
            with contextlib.suppress(OSError):
                run_files.write_report(self._settings.run_directory, values)
