"""Carries decisions out through the server's model control: the only thing of the sidecar that changes anything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapeshift.errors import NotFoundError, ShapeshiftError
from shapeshift.scheduler.fleet import READY, Control
from shapeshift.scheduler.health import Backoff
from shapeshift.scheduler.journal import Journal
from shapeshift.scheduler.moves import Action
from shapeshift.triton import modelconfig

_UNLOAD_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """What came of a series of actions: those that were done, and why it ended before the last one, or empty."""

    done: tuple[Action, ...]
    failed: str = ""


class Actuator:
    """Threads may share it; a model that one of them is loading is left alone by the others.

    `held` says why nothing may be done now, or nothing; it is asked before every single change.
    """

    def __init__(
        self,
        control: Control,
        repositories: Iterable[Path],
        journal: Journal,
        held: Callable[[], str],
        load_timeout_s: float,
    ) -> None:
        self.backoff = Backoff()
        self._control = control
        self._repositories = tuple(repositories)
        self._journal = journal
        self._held = held
        self._load_timeout_s = load_timeout_s
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._touched: set[str] = set()
        self._generations: dict[str, int] = {}

    @property
    def held(self) -> str:
        """Why nothing may be done now; empty if it may."""
        return self._held()

    @property
    def busy(self) -> frozenset[str]:
        """The models that are being changed now."""
        with self._lock:
            return frozenset(self._busy)

    def take_touched(self) -> frozenset[str]:
        """The models that are being changed now, or were since the last call."""
        with self._lock:
            touched, self._touched = frozenset(self._touched | self._busy), set()
        return touched

    def heal(self, model: str, reason: str) -> bool:
        """Replace the model's process by loading it with `generation` + 1; whether that went well.

        Nothing happens while another thread changes the model or it must wait after earlier attempts.
        """
        wait = self.backoff.wait_s(model, time.monotonic())
        if held := self._held():
            self._journal.say("health", model, f"{reason}: would be loaded again ({held})")
            return False
        if wait > 0:
            self._journal.say("health", model, f"{reason}, again: it is left alone for a while")
            return False
        with self._hold(model) as mine:
            if not mine:
                return False
            self._journal.event("health", model, f"{reason}: loading it again")
            begun = time.monotonic()
            failed = self._attempt(model, lambda: self._load(model, None, heals=True))
            self.backoff.note(model, time.monotonic())
            took = f"{time.monotonic() - begun:.1f} s"
            self._journal.event("health", model, f"not loaded: {failed}" if failed else f"loaded in {took}")
            return not failed

    def carry_out(
        self,
        batches: Iterable[list[Action]],
        keep_going: bool = False,
        heals: bool = False,
        await_unloads: bool = False,
    ) -> Outcome:
        """Do the batches one after the other, the actions of each at once.

        Ends at the first action that fails and puts the workers changed so far back to the bins that they had,
        the last one first, unless `keep_going`. `heals`: generations are raised. `await_unloads`: what an unload
        frees is needed by the next batch; otherwise its requests end in the background.
        """
        done: list[Action] = []
        failed: list[str] = []
        for batch in batches:
            with ThreadPoolExecutor(len(batch)) as threads:
                results = list(threads.map(lambda action: self._do(action, heals, await_unloads), batch))
            done += [action for action, error in zip(batch, results, strict=True) if not error]
            failed += [f"{action}: {error}" for action, error in zip(batch, results, strict=True) if error]
            if failed and not keep_going:
                return Outcome(tuple(self._put_back(done)), failed[0])
        return Outcome(tuple(done), "; ".join(failed))

    def _put_back(self, done: list[Action]) -> list[Action]:
        """Undo the changes of bins; what stays done."""
        kept = list(done)
        for action in reversed(done):
            if action.kind == "change":
                back = replace(action, bin=action.before, before=action.bin)
                if not self._do(back):
                    kept.remove(action)
        return kept

    def _do(self, action: Action, heals: bool = False, await_unloads: bool = False) -> str:
        """Carry one action out; why it failed, or nothing."""
        if held := self._held():
            return held
        with self._hold(action.worker) as mine:
            if not mine:
                return "another load of it is running"
            begun = time.monotonic()
            if action.kind == "unload":
                failed = self._attempt(action.worker, lambda: self._unload(action.worker, await_unloads))
            else:
                failed = self._attempt(action.worker, lambda: self._load(action.worker, action.bin, heals))
                if failed or heals:
                    self.backoff.note(action.worker, time.monotonic())
            took = f"{time.monotonic() - begun:.1f} s"
            self._journal.event("change", action.worker, f"{action}: {failed or took}")
            return failed

    def _unload(self, model: str, await_end: bool) -> None:
        self._control.unload(model)
        if await_end:
            # Requests that run on for longer are no reason to stop.
            with contextlib.suppress(ShapeshiftError):
                self._control.wait_unloaded(model, timeout_s=_UNLOAD_S)

    def _load(self, model: str, bin_: int | None, heals: bool) -> None:
        config = self._config(model)
        if config is None:
            # Its files are the server's alone: loaded as they are first, then as they should be.
            self._control.load(model, timeout_s=self._load_timeout_s)
            config = self._control.config(model)
        parameters = config.setdefault("parameters", {})
        if bin_ is not None:
            parameters["bin"] = {"string_value": str(bin_)}
        if heals:
            parameters["generation"] = {"string_value": str(self._next_generation(model, parameters))}
        self._control.load(model, config, timeout_s=self._load_timeout_s)

    def _config(self, model: str) -> dict[str, Any] | None:
        """The configuration that the model runs with, else that of its folder, if there is one to be read here."""
        if any(one.name == model and one.state == READY for one in self._control.index()):
            return self._control.config(model)
        for folder in self._repositories:
            with contextlib.suppress(NotFoundError):
                return modelconfig.as_json(modelconfig.read(folder / model / "config.pbtxt"))
        return None

    def _next_generation(self, model: str, parameters: dict[str, Any]) -> int:
        present = str(parameters.get("generation", {}).get("string_value", ""))
        # Also above those that were tried in vain: the server loads nothing that it has just been given.
        latest = max(int(present) if present.isdecimal() else 0, self._generations.get(model, 0))
        self._generations[model] = latest + 1
        return latest + 1

    def _attempt(self, model: str, change: Callable[[], None]) -> str:
        try:
            change()
        except ShapeshiftError as error:
            return " ".join(str(error).split())
        return ""

    @contextlib.contextmanager
    def _hold(self, model: str) -> Iterator[bool]:
        with self._lock:
            mine = model not in self._busy
            self._busy |= {model}
        try:
            yield mine
        finally:
            if mine:
                with self._lock:
                    self._busy -= {model}
                    self._touched |= {model}
