"""Keeps one node running: starts it, adopts it, starts it again when it ends, drains and stops it."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace

from shapeshift import files
from shapeshift.errors import ShapeshiftError
from shapeshift.fleet.supervision.node_process import (
    NodeCommand,
    NodeProcess,
    NodeRecord,
    forget_record,
    read_record,
    write_record,
)
from shapeshift.loops import Backoff, Loop
from shapeshift.triton.embedded.run_record import Identity

# STARTING: not ready yet, or ended and about to be started again. READY: was ready once and has not ended; its own
# process starts a server again that ends. LEAVING: no member any more, still answering.
STARTING, READY, LEAVING, STOPPING, STOPPED = "starting", "ready", "leaving", "stopping", "stopped"
_PERIOD_S = 0.5
# Others look for a changed fleet file each second, and who writes it looks at this state each second.
LEAVE_S = 4.0


@dataclass(frozen=True)
class NodeStatus:
    """state: as above; pid: of `shapeshift serve`, 0 without one; starts: how often this supervisor started it;
    problem: why it is not ready, as far as known; build: the folder that it serves from; is_drained: not to run."""

    state: str
    pid: int = 0
    starts: int = 0
    problem: str = ""
    build: str = ""
    is_drained: bool = False

    @property
    def is_member(self) -> bool:
        """Whether others may send it requests."""
        return self.state == READY


class NodeSupervisor:
    """Works on a thread of its own until `close`, which leaves the node running.

    It goes on where the last supervisor of the node has ended: with a node that runs as it is served, with one that is
    drained until that is done. continues: whether it stands for the last one, so that a node that has ended is served
    as before, not as `command` says. leave_s: between the moment at which a node that is drained is no member any more
    and its stop.
    """

    def __init__(
        self, command: NodeCommand, continues: bool = False, leave_s: float = LEAVE_S, period_s: float = _PERIOD_S
    ) -> None:
        self._leave_s = leave_s
        self._period_s = period_s
        self._lock = threading.Lock()
        record = read_record(command.name, command.file)
        if record is None or not (continues or record.is_kept):
            record = NodeRecord(command)
        self._process = NodeProcess(record.command)
        self._is_drained = record.is_drained
        self._leaves_at: float | None = time.monotonic() + leave_s if record.is_drained else None
        self._is_ending = False
        self._ready: Identity | None = None
        self._starts, self._started_at, self._start_at = 0, 0.0, 0.0
        self._backoff = Backoff()
        self._status = NodeStatus(STARTING, build=str(command.build))
        self._remember()
        self._loop = Loop("supervisor", self._step, self._report)
        self._loop.start()

    def status(self) -> NodeStatus:
        """The state found last, at most a period old."""
        return replace(self._status, is_drained=self._is_drained)

    def command(self) -> NodeCommand:
        """How the node is served, or was before it was stopped."""
        return self._process.command

    def write_fleet_file(self, text: str) -> None:
        """Replace the fleet file that the node's processes watch, unless it says the same."""
        file = self._process.command.file
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            files.replace_text(file, text, durable=False)

    def drain(self) -> None:
        """Leave the fleet, end the requests in flight, and stop. Returns at once."""
        with self._lock:
            if not self._is_drained:
                self._is_ending, self._leaves_at = False, time.monotonic() + self._leave_s
                self._is_drained = True
                self._remember()

    def forget(self) -> None:
        """Leave nothing for the next supervisor: the node is no longer one of the fleet. Raises OSError."""
        forget_record(self._process.command.file)

    def start(self, command: NodeCommand | None = None) -> None:
        """Start a node that was drained, with `command` in place of the last one if it is given.

        Raises ShapeshiftError while it is still running.
        """
        with self._lock:
            if not self._is_drained:
                return
            if self._process.identity is not None:
                raise ShapeshiftError(f"node {self._process.command.name} is still stopping")
            if command is not None:
                self._process = NodeProcess(command)
            self._is_drained, self._backoff, self._start_at = False, Backoff(), 0.0
            self._remember()

    def close(self) -> None:
        """End the thread; the node keeps running."""
        self._loop.stop()

    def _step(self) -> float:
        with self._lock:
            problem = ""
            try:
                state = self._end() if self._is_drained else self._keep()
            except (ShapeshiftError, OSError) as error:
                state, problem = STARTING, str(error)
            running = self._process.identity
            if state == STARTING and not problem:
                problem = self._process.last_line()
            build = str(self._process.command.build)
            self._status = NodeStatus(state, running.pid if running else 0, self._starts, problem, build)
        return self._period_s

    def _report(self, problem: str) -> None:
        self._status = replace(self._status, problem=problem)

    def _keep(self) -> str:
        """Start the process if none runs, after a pause that grows while it keeps ending."""
        now = time.monotonic()
        if self._process.identity is None:
            if self._started_at:
                self._start_at = now + self._backoff.pause(now - self._started_at)
                self._started_at = 0.0
            if now >= self._start_at:
                self._started_at = now
                self._process.start()
                self._starts += 1
            return STARTING
        if self._ready != self._process.identity and self._process.is_ready():
            self._ready = self._process.identity
        return READY if self._ready is not None and self._ready == self._process.identity else STARTING

    def _end(self) -> str:
        if self._process.identity is None:
            self._started_at = 0.0
            return STOPPED
        if self._leaves_at is not None and time.monotonic() < self._leaves_at:
            return LEAVING
        if not self._is_ending:
            self._process.terminate()
            self._is_ending = True
        return STOPPING

    def _remember(self) -> None:
        # Where the disk is full, only the next supervisor does not know it.
        with contextlib.suppress(OSError):
            write_record(NodeRecord(self._process.command, self._is_drained))
