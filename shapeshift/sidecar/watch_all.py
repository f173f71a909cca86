"""Which Python models of a server are dead or hang, whoever wrote them: by their processes and the server's counts.

A foreign model has no heartbeat. Where the server's processes are visible, its stubs show an end and a suspension at
once. Elsewhere only the server's own counts are left: requests that wait while none ends.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.health import DeadModel, ReloadBackoff
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage, ServerCounts
from shapeshift.sidecar.servers import Changes
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.processes import Stub

# Looks in a row that show a process missing or suspended: one may fall into a change by model control.
LOOKS = 3
# Of a longer pause between two looks no more counts: the sidecar was delayed, and perhaps the model with it.
_MOST_S = 2.0
_PYTHON = "python"
_UNSEEN = "its processes are not visible here: only models that hang are noticed, with --hang-seconds"


@dataclass
class _Model:
    """A loaded model. groups: its instance groups; seen: names of its instances that have had a process.

    floor: the fewest waiting requests yet. The server (24.10) goes on to count requests whose client left a hung model.
    """

    is_python: bool
    groups: Any
    seen: set[str] = field(default_factory=set)
    looks: int = 0
    counts: ServerCounts | None = None
    floor: float = float("inf")
    waited_s: float = 0.0


class WatchAll:
    """Judges all Python models of one server but those with a heartbeat. One thread calls `dead`.

    port: of gRPC of a server on this machine; None for one elsewhere.
    """

    def __init__(
        self,
        settings: SidecarSettings,
        control: Changes,
        backoff: ReloadBackoff,
        journal: Journal,
        port: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._control = control
        self._backoff = backoff
        self._journal = journal
        self._port = port
        self._clock = clock
        # Pid of the server.
        self._server: int | None = None
        self._models: dict[str, _Model] = {}
        self._at: float | None = None

    def dead(self, page: MetricsPage, changing: Collection[str]) -> dict[str, DeadModel]:
        """Look once: the dead models that are to be reloaded. changing: models that are being loaded or unloaded."""
        elapsed_s = 0.0 if self._at is None else min(page.at - self._at, _MOST_S)
        self._at = page.at
        # Before the states: the processes of a model that is unloaded meanwhile are not missed.
        stubs = self._stubs()
        names = page.counts.keys() - page.heartbeats().keys() - {*self._settings.spared}
        try:
            ready = self._control.ready(names)
        except ShapeshiftError:
            # The plan loop says so.
            return {}
        self._models = {name: model for name, model in self._models.items() if name in ready}
        dead = {}
        for name in sorted(ready):
            model = self._models.get(name) or self._read(name)
            if model is None or name in changing:
                # Whatever is loaded then is looked at anew.
                self._models.pop(name, None)
                continue
            self._models[name] = model
            verdict = self._process(name, model, stubs) or self._hang(model, page.counts[name], elapsed_s, stubs)
            if verdict is None:
                self._backoff.seen_alive(name, self._clock())
            elif self._backoff.attempts(name) < self._settings.most_reloads:
                dead[name] = verdict
            else:
                text = f"left alone after {self._settings.most_reloads} reloads in a row: load it by hand"
                self._journal.log_once("health", name, text, logging.ERROR)
        return dead

    def _stubs(self) -> list[Stub] | None:
        """The processes of the server's models; None where they are not visible."""
        stubs = [] if self._port is None else processes.stubs()
        if self._port is not None and not (self._server and processes.listens(self._server, self._port)):
            pids = sorted({stub.server for stub in stubs})
            self._server = next((pid for pid in pids if processes.listens(pid, self._port)), None)
        seen = self._server is not None
        text = f"sees the processes of its models, those of process {self._server}" if seen else _UNSEEN
        self._journal.log_once("watch", "server", text, logging.INFO if seen else logging.WARNING)
        return [stub for stub in stubs if stub.server == self._server] if seen else None

    def _read(self, name: str) -> _Model | None:
        try:
            config = self._control.config(name)
        except ShapeshiftError:
            return None
        return _Model(config.get("backend") == _PYTHON, config.get("instance_group", []))

    def _process(self, name: str, model: _Model, stubs: list[Stub] | None) -> DeadModel | None:
        """Whether one of its processes has ended, or is suspended."""
        if stubs is None:
            return None
        alive = _of(model, stubs)
        running = {stub.instance for stub in alive}
        suspended = tuple(stub.identity.pid for stub in alive if processes.is_suspended(stub.identity.pid))
        missing = model.seen - running
        none_left = not running and (model.is_python or bool(model.seen))
        if missing or none_left:
            # Another number of instances in place: nothing has died.
            loaded = self._read(name)
            if loaded is None or loaded.groups != model.groups:
                self._models.pop(name, None)
                return None
        model.looks = model.looks + 1 if missing or none_left or suspended else 0
        model.seen |= running
        if model.looks < LOOKS:
            return None
        if missing or none_left:
            return DeadModel(f"the process of {', '.join(sorted(missing)) or 'its instances'} has ended", True)
        return DeadModel("its process is suspended (SIGSTOP)", True, suspended=suspended)

    def _hang(
        self, model: _Model, counts: ServerCounts, elapsed_s: float, stubs: list[Stub] | None
    ) -> DeadModel | None:
        """Whether requests wait, and none has ended for too long."""
        before, model.counts = model.counts, counts
        model.floor = min(model.floor, counts.pending)
        stands = before is not None and counts.done == before.done and counts.pending > model.floor
        model.waited_s = model.waited_s + elapsed_s if stands else 0.0
        limit_s = self._settings.hang_seconds
        if not limit_s or model.waited_s < limit_s or not (model.is_python or model.seen):
            return None
        hung = tuple(stub.identity.pid for stub in _of(model, stubs or ()))
        return DeadModel(f"requests wait, and none has ended for {limit_s:g} s", False, hung)


def _of(model: _Model, stubs: Iterable[Stub]) -> list[Stub]:
    """The model's own processes: Triton names an instance by its group and a number."""
    groups = [re.escape(group.get("name", "")) for group in model.groups]
    pattern = re.compile(rf"(?:{'|'.join(groups)})_\d+(?:_gpu\d+)?")
    return [stub for stub in stubs if pattern.fullmatch(stub.instance)]
