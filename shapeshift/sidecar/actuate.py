"""Applies decisions through the server's model control. Nothing else in the sidecar changes the server."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.sidecar.health import DeadModel, ReloadBackoff
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.policy.moves import Action
from shapeshift.sidecar.run_files import OwedLoads
from shapeshift.sidecar.servers import Changes
from shapeshift.triton import model_config
from shapeshift.triton.embedded import processes
from shapeshift.triton.embedded.processes import Stub
from shapeshift.triton.names import split

# A load that takes longer has failed: large models on a busy machine take minutes.
LOAD_TIMEOUT_S = 900.0
_LOOK_S = 0.2
_MOST_AT_ONCE = 4096
_INTERRUPTED = "a node is gone: the rest is planned anew"


@dataclass(frozen=True)
class Outcome:
    """The actions that were done, and why the others were not; `failed` is empty if all were done.

    begun: those that an interruption has left running. They end by themselves, and their workers are not changed
    meanwhile.
    """

    done: tuple[Action, ...]
    failed: str = ""
    begun: tuple[Action, ...] = ()


class Actuator:
    """Thread-safe. While one thread changes a model, other threads leave it alone.

    blocked: returns why no change is allowed now, or an empty string; it is called before each change. owed: models
    that `reload` has unloaded and not loaded again yet.
    """

    def __init__(
        self,
        control: Changes,
        repositories: Iterable[Path],
        journal: Journal,
        blocked: Callable[[], str],
        owed: OwedLoads | None = None,
    ) -> None:
        self.owed = owed or OwedLoads()
        self.backoff = ReloadBackoff()
        self._control = control
        self._repositories = tuple(repositories)
        self._journal = journal
        self._blocked = blocked
        self._lock = threading.Lock()
        self._changing: set[str] = set()
        self._changed: set[str] = set()
        self._generations: dict[str, int] = {}

    @property
    def blocked(self) -> str:
        """Why no change is allowed now; empty if changes are allowed."""
        return self._blocked()

    @property
    def changing(self) -> frozenset[str]:
        """The models that are being changed now."""
        with self._lock:
            return frozenset(self._changing)

    def take_changed(self) -> frozenset[str]:
        """The models that are being changed now or were changed since the last call."""
        with self._lock:
            changed, self._changed = frozenset(self._changed | self._changing), set()
        return changed

    def reload(self, model: str, dead: DeadModel) -> bool:
        """Replace the model's process by loading it with `generation` + 1. Returns whether that succeeded.

        dead.ended: no process of the model is left. Then it is unloaded first, unless it is a worker: the server
        (24.10) would go on to give a dead process requests, which are never answered. Without it they are refused at
        once.

        dead.hung: processes of the model that never answer, which are killed then: the server (24.10) would wait for
        them for ever. dead.suspended: are killed first: one that goes on after so long crashes, and the server with it.
        Does nothing while another thread changes the model, or while the model is in backoff.
        """
        reason = dead.reason
        wait = self.backoff.wait_s(model, time.monotonic())
        if blocked := self._blocked():
            self._journal.log_once("health", model, f"{reason}: would be reloaded ({blocked})", logging.WARNING)
            return False
        if wait > 0:
            self._journal.log_once("health", model, f"{reason} again: waiting before the next reload", logging.WARNING)
            return False
        with self._exclusive(model) as acquired:
            if not acquired:
                return False
            self._journal.log("health", model, f"{reason}: reloading", logging.WARNING)
            start = time.monotonic()
            hung = [*filter(None, map(processes.stub, dead.hung))]
            for suspended in filter(None, map(processes.stub, dead.suspended)):
                self._kill(model, suspended, "suspended")
            failed = self._attempt(lambda: self._replace(model, dead.ended))
            self.backoff.record(model, time.monotonic())
            seconds = f"{time.monotonic() - start:.1f} s"
            self._journal.log(
                "health", model, f"not loaded: {failed}" if failed else f"loaded in {seconds}", _level(failed)
            )
            for old in () if failed else hung:
                self._kill(model, old, "old")
            return not failed

    def _kill(self, model: str, process: Stub, said: str) -> None:
        if processes.kill(process.identity):
            self._journal.log("health", model, f"killed the {said} process {process.identity.pid}", logging.WARNING)

    def apply(
        self,
        batches: Iterable[list[Action]],
        keep_going: bool = False,
        new_process: bool = False,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Apply the batches in order, the actions of one batch concurrently.

        Stops at the first batch with a failed action and gives the workers changed so far their old bins back, the
        last one first, unless `keep_going`. new_process: raise the generation of each loaded worker. interrupted: asked
        five times a second; whether to leave the rest undone, without waiting for what runs.
        """
        done: list[Action] = []
        failed: list[str] = []
        for batch in batches:
            if interrupted():
                return Outcome(tuple(done), _INTERRUPTED)
            calls = self._begin(batch, new_process)
            while wait(calls.values(), _LOOK_S).not_done and not interrupted():
                pass
            ended = {action: call.result() for action, call in calls.items() if call.done()}
            done += [action for action, error in ended.items() if not error]
            if begun := tuple(action for action in calls if action not in ended):
                return Outcome(tuple(done), _INTERRUPTED, begun)
            failed += [f"{action}: {error}" for action, error in ended.items() if error]
            if failed and not keep_going:
                return Outcome(tuple(self._roll_back(done)), failed[0])
        return Outcome(tuple(done), "; ".join(failed))

    def _begin(self, batch: Iterable[Action], new_process: bool) -> dict[Action, Future[str]]:
        """By action, the call that applies it in a thread of its own."""
        threads = ThreadPoolExecutor(thread_name_prefix="apply", max_workers=_MOST_AT_ONCE)
        calls = {action: threads.submit(self._apply, action, new_process) for action in batch}
        threads.shutdown(wait=False)
        return calls

    def _roll_back(self, done: list[Action]) -> list[Action]:
        """Undo the changes of bins. Returns the actions that remain in effect."""
        remaining = list(done)
        for action in reversed(done):
            if action.kind == "change":
                inverse = replace(action, bin=action.before, before=action.bin)
                if not self._apply(inverse):
                    remaining.remove(action)
        return remaining

    def _apply(self, action: Action, new_process: bool = False) -> str:
        """Apply one action. Returns why it failed, or an empty string."""
        if blocked := self._blocked():
            return blocked
        with self._exclusive(action.worker) as acquired:
            if not acquired:
                return "another load of this model is running"
            start = time.monotonic()
            if action.kind == "unload":
                failed = self._attempt(lambda: self._control.unload(action.worker))
            else:
                failed = self._attempt(lambda: self._load(action.worker, action.bin, new_process))
                if failed or new_process:
                    self.backoff.record(action.worker, time.monotonic())
            seconds = f"{time.monotonic() - start:.1f} s"
            self._journal.log("change", action.worker, f"{action}: {failed or seconds}", _level(failed))
            return failed

    def _replace(self, model: str, ended: bool) -> None:
        config = self.owed.config(model) or self._config(model)
        if ended and config is not None and not config.get("parameters", {}).get("worker_of"):
            # Where the file cannot be written, the model is not unloaded: a sidecar that ends would leave it so.
            with contextlib.suppress(OSError):
                self.owed.add(model, config)
                self._control.unload(model)
        self._load(model, None, new_process=True, config=config)
        self.owed.remove(model)

    def _load(self, model: str, bin_: int | None, new_process: bool, config: dict[str, Any] | None = None) -> None:
        config = config or self._config(model)
        if config is None:
            # Only the server has the files: load the model as it is to learn its configuration, then change that.
            self._control.load(model, timeout_s=LOAD_TIMEOUT_S)
            config = self._control.config(model)
        parameters = config.setdefault("parameters", {})
        if bin_ is not None:
            parameters["bin"] = {"string_value": str(bin_)}
        if new_process:
            parameters["generation"] = {"string_value": str(self._next_generation(model, parameters))}
        self._control.load(model, config, timeout_s=LOAD_TIMEOUT_S)

    def _config(self, model: str) -> dict[str, Any] | None:
        """The configuration of the loaded model, else the one in its folder; None if neither is readable here."""
        if self._control.is_loaded(model):
            return self._control.config(model)
        for folder in self._repositories:
            with contextlib.suppress(NotFoundError):
                return model_config.as_json(model_config.read(folder / split(model)[1] / "config.pbtxt"))
        return None

    def _next_generation(self, model: str, parameters: dict[str, Any]) -> int:
        present = str(parameters.get("generation", {}).get("string_value", ""))
        # Above failed attempts as well: the server ignores a load with the configuration that it got last.
        latest = max(int(present) if present.isdecimal() else 0, self._generations.get(model, 0))
        self._generations[model] = latest + 1
        return latest + 1

    def _attempt(self, change: Callable[[], None]) -> str:
        try:
            change()
        except ShapeshiftError as error:
            return " ".join(str(error).split())
        return ""

    @contextlib.contextmanager
    def _exclusive(self, model: str) -> Iterator[bool]:
        """Mark the model as being changed; False if another thread is already changing it."""
        with self._lock:
            acquired = model not in self._changing
            self._changing |= {model}
        try:
            yield acquired
        finally:
            if acquired:
                with self._lock:
                    self._changing -= {model}
                    self._changed |= {model}


def _level(failed: str) -> int:
    return logging.ERROR if failed else logging.INFO
