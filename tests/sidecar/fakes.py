"""A fake server in memory, and hand-made metrics pages."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shapeshift.errors import EngineError, ShapeshiftError
from shapeshift.sidecar.front_config import Front, read_front
from shapeshift.sidecar.observe import (
    HEARTBEAT,
    LATENCIES,
    LENGTHS,
    OUTSTANDING,
    RUNNING,
    STALLED,
    TIMEOUTS,
    WAITING,
    MetricsPage,
)
from shapeshift.triton.metrics import Samples
from shapeshift.triton.model_state import ModelState

EDGES = (32, 128, 512)
PROFILE = {
    "engines": [
        {"tokens": None, "rows": None, "latency": [[8, 3, 4, 3], [512, 100, 120, 99]]},
        {"tokens": 32, "rows": 1, "latency": [[32, 5, 6, 5]]},
        {"tokens": 128, "rows": 1, "latency": [[128, 20, 22, 19]]},
    ]
}
SERVICE_MS = (5.0, 20.0, 100.0)


def parameters(**changes: object) -> dict[str, str]:
    """The parameters of a generated front with three bins and four workers."""
    values: dict[str, object] = {
        "placement": "partitioned",
        "slo_ms": 300,
        "workers": 4,
        "bin_edges": json.dumps(EDGES),
        "plan_histogram": "[8, 1, 1]",
        "profile": json.dumps(PROFILE),
    }
    stated = values | changes
    # By default the number of workers is fixed.
    return {name: str(value) for name, value in ({"min_workers": stated["workers"]} | stated).items()}


def front(name: str = "enc", **changes: object) -> Front:
    return read_front(name, parameters(**changes))


def config(name: str, **values: object) -> dict[str, Any]:
    return {"name": name, "parameters": {key: {"string_value": str(value)} for key, value in values.items()}}


class FakeServer:
    """Model control in memory. files: configurations of the folders; loaded: those of the loaded models; calls: log.

    fails: called with (name, bin) at each load; returns an error text, or None.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self.loaded: dict[str, dict[str, Any]] = {}
        self.states: dict[str, str] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.fails: Callable[[str, str], str | None] = lambda name, bin_: None
        self.down = False
        self._lock = threading.Lock()

    def add_front(self, name: str = "enc", models: int = 6, **changes: object) -> None:
        """A front that is loaded, and the folders of its workers, which are not loaded."""
        self.files[name] = self.loaded[name] = config(name, **parameters(**changes))
        for number in range(models):
            worker = f"{name}_w{number:02d}"
            self.files[worker] = config(worker, worker_of=name, bin=EDGES[-1], generation=0)

    def bins(self, name: str = "enc") -> dict[str, str]:
        """The bin of each worker of the front that is loaded."""
        return {model: self.parameter(model, "bin") for model in sorted(self.loaded) if model.startswith(f"{name}_w")}

    def parameter(self, model: str, name: str) -> str:
        return str(self.loaded[model]["parameters"][name]["string_value"])

    def restart(self) -> None:
        """Unload all workers, as a restart of the server does."""
        self.loaded = {name: found for name, found in self.loaded.items() if "_w" not in name}

    def load(self, name: str, config: dict[str, Any] | None = None, timeout_s: float = 300.0) -> None:
        self.require_up()
        if name not in self.files:
            raise EngineError(f"cannot load {name}: failed to poll from model repository")
        given = copy.deepcopy(config or self.files[name])
        bin_ = given["parameters"].get("bin", {}).get("string_value", "")
        with self._lock:
            self.calls.append(("load", name, bin_))
        if text := self.fails(name, bin_):
            raise EngineError(text)
        with self._lock:
            self.loaded[name] = given

    def unload(self, name: str, timeout_s: float = 30.0) -> None:
        self.require_up()
        with self._lock:
            self.calls.append(("unload", name, ""))
            self.loaded.pop(name, None)

    def index(self, timeout_s: float = 5.0) -> list[ModelState]:
        self.require_up()
        names = sorted({*self.files, *self.loaded})
        states = {name: self.states.get(name, "READY" if name in self.loaded else "") for name in names}
        return [ModelState(name, "1", state, "") for name, state in states.items()]

    def is_loaded(self, name: str) -> bool:
        return bool(self.ready([name]))

    def ready(self, names: Collection[str]) -> set[str]:
        return {*names} & {one.name for one in self.index() if one.state == "READY"}

    def config(self, name: str, timeout_s: float = 5.0) -> dict[str, Any]:
        self.require_up()
        if name not in self.loaded:
            raise ShapeshiftError(f"{name} is not loaded")
        return copy.deepcopy(self.loaded[name])

    def parameters(self, name: str, timeout_s: float = 5.0) -> dict[str, str]:
        declared = self.config(name)["parameters"]
        return {key: str(value["string_value"]) for key, value in declared.items()}

    def require_up(self) -> None:
        if self.down:
            raise ShapeshiftError("no server answers")


def samples(model: str, pid: int, heartbeat: float, **more: Mapping[str, float]) -> Samples:
    """The samples of one process: its heartbeat, and for each keyword the values of that metric by label."""
    names = {
        "lengths": (LENGTHS, "le"),
        "latencies": (LATENCIES, "le"),
        "outstanding": (OUTSTANDING, "worker"),
        "timeouts": (TIMEOUTS, "worker"),
        "waiting": (WAITING, "none"),
        "running": (RUNNING, "none"),
        "slots": ("shapeshift_slots", "none"),
        "kv_usage": ("shapeshift_kv_cache_usage", "none"),
        "stalled": (STALLED, "thread"),
    }
    own = {("model", model), ("pid", str(pid))}
    found: Samples = {(HEARTBEAT, frozenset(own)): heartbeat}
    for key, values in more.items():
        metric, label = names[key]
        for text, value in values.items():
            found[metric, frozenset(own | ({(label, text)} if text else set()))] = value
    return found


def page(at: float, *parts: Samples) -> MetricsPage:
    merged: Samples = {}
    for part in parts:
        merged |= part
    return MetricsPage(merged, at)


def cumulative(counts: Mapping[float, float]) -> dict[str, float]:
    """Cumulative counts by upper bound, as a metrics page shows them."""
    total, shown = 0.0, {}
    for bound, count in sorted(counts.items()):
        total += count
        shown[f"{bound:g}"] = total
    return shown | {"+Inf": total}
