"""The models that the server holds now: fronts and their workers, read from its index and the loaded configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.front_config import ALL_BINS, Front, read_front
from shapeshift.triton.model_state import ModelState

READY = "READY"
_UNKNOWN = "UNKNOWN"
# States from which a model can be loaded at once.
UNLOADED = ("", "UNAVAILABLE")


class Control(Protocol):
    """The part of `triton.control.ModelControl` that the sidecar uses: model control of one server."""

    def load(self, name: str, config: dict[str, Any] | None = None, timeout_s: float = 900.0) -> None: ...

    def unload(self, name: str, timeout_s: float = 30.0) -> None: ...

    def index(self, timeout_s: float = 5.0) -> list[ModelState]: ...

    def config(self, name: str, timeout_s: float = 5.0) -> dict[str, Any]: ...

    def parameters(self, name: str, timeout_s: float = 5.0) -> dict[str, str]: ...


@dataclass(frozen=True)
class Worker:
    """One worker model. bin and generation are those of the loaded configuration, 0 while it is not loaded."""

    name: str
    state: str
    bin: int = ALL_BINS
    generation: int = 0

    @property
    def is_ready(self) -> bool:
        return self.state == READY

    @property
    def is_unloaded(self) -> bool:
        """Whether it is neither loaded, nor loading, nor unloading."""
        return self.state in UNLOADED


@dataclass(frozen=True)
class ServerModels:
    """The models of one server, or of a fleet.

    fronts: the loaded ones; workers: the worker models of each front, by node and number; states: of every model;
    problems: by model, why it is ignored. nodes: those that have answered and are not gone; pending: those that have
    not answered this time, but are not gone either.
    """

    fronts: Mapping[str, Front] = field(default_factory=dict)
    workers: Mapping[str, tuple[Worker, ...]] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    pending: frozenset[str] = frozenset()


class ServerModelReader:
    """Reads the models of one server. Not thread-safe.

    A configuration is requested once, and again after its model was not ready or after `forget`. gone: a single server
    is never taken for gone, since there is nothing to plan around it.
    """

    gone: frozenset[str] = frozenset()

    def __init__(self, control: Control) -> None:
        self._control = control
        self._configs: dict[str, dict[str, str]] = {}

    def forget(self, *models: str) -> None:
        """Request the configurations of these models again; of all models if none is given."""
        for model in models or tuple(self._configs):
            self._configs.pop(model, None)

    def read(self) -> ServerModels:
        """The present models. Raises ShapeshiftError if no server answers."""
        states = _states(self._control.index())
        self._configs = {model: parameters for model, parameters in self._configs.items() if states.get(model) == READY}
        problems: dict[str, str] = {}
        fronts: dict[str, Front] = {}
        for model, state in states.items():
            parameters = self._parameters(model) if state == READY else None
            if parameters is None or "worker_of" in parameters or "placement" not in parameters:
                continue
            try:
                fronts[model] = read_front(model, parameters)
            except ShapeshiftError as error:
                problems[model] = f"ignored: {error}"
        workers = {name: self._workers(front, states, problems) for name, front in fronts.items() if front.has_workers}
        return ServerModels(fronts, workers, states, problems, frozenset({""}))

    def _workers(self, front: Front, states: Mapping[str, str], problems: dict[str, str]) -> tuple[Worker, ...]:
        numbered = [(number, model) for model in states if (number := front.worker_number(model)) is not None]
        workers = []
        for _, model in sorted(numbered):
            parameters = self._parameters(model) if states[model] == READY else {}
            if parameters is None:
                workers.append(Worker(model, _UNKNOWN))
                continue
            owner = parameters.get("worker_of", front.name)
            if owner != front.name:
                problems[model] = f"ignored: worker_of: got {owner!r}; must be {front.name!r}"
                continue
            try:
                bin_, generation = (int(parameters.get(name) or "0") for name in ("bin", "generation"))
            except ValueError:
                problems[model] = f"bin and generation must be whole numbers: got {parameters}"
                bin_, generation = ALL_BINS, 0
            workers.append(Worker(model, states[model], bin_, generation))
        return tuple(workers)

    def _parameters(self, model: str) -> dict[str, str] | None:
        """The parameters of the loaded model; None if it has been unloaded."""
        if model not in self._configs:
            try:
                self._configs[model] = self._control.parameters(model)
            except ShapeshiftError:
                return None
        return self._configs[model]


def _states(index: list[ModelState]) -> dict[str, str]:
    """The state of each model; if it has several versions, the state closest to READY."""
    order = (READY, "LOADING", "UNLOADING", "UNAVAILABLE", "")
    states: dict[str, str] = {}
    for model in index:
        present = states.get(model.name, "")
        state = model.state if model.state in order else ""
        states[model.name] = min(present, state, key=order.index)
    return states
