"""What the server holds now: fronts and their workers, read from its index and the loaded configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shapeshift.errors import ShapeshiftError
from shapeshift.scheduler import front as fronts
from shapeshift.scheduler.front import ALL, Front
from shapeshift.triton.control import ModelState

READY = "READY"
_UNKNOWN = "UNKNOWN"
# States in which a model can be loaded without waiting for anything.
_AT_REST = ("", "UNAVAILABLE")


class Control(Protocol):
    """What is used of `triton.control.ModelControl`."""

    def load(self, name: str, config: dict[str, Any] | None = None, timeout_s: float = 300.0) -> None: ...

    def unload(self, name: str, timeout_s: float = 30.0) -> None: ...

    def wait_unloaded(self, name: str, timeout_s: float = 30.0) -> None: ...

    def index(self, timeout_s: float = 5.0) -> list[ModelState]: ...

    def config(self, name: str, timeout_s: float = 5.0) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Worker:
    """One worker model. bin and generation are those of the loaded configuration, 0 while it is not loaded."""

    name: str
    state: str
    bin: int = ALL
    generation: int = 0

    @property
    def is_ready(self) -> bool:
        return self.state == READY

    @property
    def is_at_rest(self) -> bool:
        """Whether it is neither loaded nor on its way there or back."""
        return self.state in _AT_REST


@dataclass(frozen=True)
class Fleet:
    """The loaded fronts, the worker models of each by name in order, every model's state, and what is wrong."""

    fronts: Mapping[str, Front] = field(default_factory=dict)
    workers: Mapping[str, tuple[Worker, ...]] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


class FleetReader:
    """Reads the fleet. One thread uses it.

    A configuration is asked for once, and again when its model was not ready in between or `forget` was called.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._configs: dict[str, dict[str, str]] = {}

    def forget(self, *models: str) -> None:
        """Ask for these models' configurations anew; for all where none is named."""
        for model in models or tuple(self._configs):
            self._configs.pop(model, None)

    def read(self) -> Fleet:
        """The fleet as it is now. Raises ShapeshiftError where no server answers."""
        states = _states(self._control.index())
        self._configs = {model: found for model, found in self._configs.items() if states.get(model) == READY}
        problems: dict[str, str] = {}
        found: dict[str, Front] = {}
        for model, state in states.items():
            parameters = (self._parameters(model) or {}) if state == READY else {}
            if "placement" not in parameters or "worker_of" in parameters:
                continue
            try:
                found[model] = fronts.read(model, parameters)
            except ShapeshiftError as error:
                problems[model] = f"left alone: {error}"
        workers = {name: self._workers(front, states, problems) for name, front in found.items() if front.has_workers}
        return Fleet(found, workers, states, problems)

    def _workers(self, front: Front, states: Mapping[str, str], problems: dict[str, str]) -> tuple[Worker, ...]:
        numbered = [(number, model) for model in states if (number := front.worker_number(model)) is not None]
        found = []
        for _, model in sorted(numbered):
            parameters = self._parameters(model) if states[model] == READY else {}
            if parameters is None:
                found.append(Worker(model, _UNKNOWN))
                continue
            owner = parameters.get("worker_of", front.name)
            if owner != front.name:
                problems[model] = f"left alone: worker_of is {owner}, not {front.name}"
                continue
            try:
                bin_, generation = (int(parameters.get(name) or "0") for name in ("bin", "generation"))
            except ValueError:
                problems[model] = f"bin and generation must be whole numbers, got {parameters}"
                bin_, generation = ALL, 0
            found.append(Worker(model, states[model], bin_, generation))
        return tuple(found)

    def _parameters(self, model: str) -> dict[str, str] | None:
        """The parameters that the model runs with; None where it has just gone."""
        if model not in self._configs:
            try:
                declared = self._control.config(model).get("parameters", {})
            except ShapeshiftError:
                return None
            self._configs[model] = {name: str(value.get("string_value", "")) for name, value in declared.items()}
        return self._configs[model]


def _states(index: list[ModelState]) -> dict[str, str]:
    """Each model's state; of several versions, the one that is furthest."""
    order = (READY, "LOADING", "UNLOADING", "UNAVAILABLE", "")
    states: dict[str, str] = {}
    for model in index:
        present = states.get(model.name, "")
        known = model.state if model.state in order else ""
        states[model.name] = min(present, known, key=order.index)
    return states
