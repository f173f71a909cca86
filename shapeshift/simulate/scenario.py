"""SCENARIO.toml: a load, and one or more systems that serve it.

    seed = 1

    [load]                  # see `workloads.load.Load`
    rate = 100
    lengths = "long"

    [polymorph]             # parameters of config.pbtxt, and `TextEngines`; or the section of another technique
    profile = "profile.json"
    placement = "partitioned"
    workers = 8
    slo_ms = 450

    [sidecar]               # see `planner.Pace`
    plan_period_s = 60

    [compare.paper]         # what is different in a further system
    dispatch = "multilevel"

Every name is checked. Paths are relative to the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shapeshift import settings
from shapeshift.errors import ShapeshiftError
from shapeshift.settings import Choices, require
from shapeshift.simulate.events import Progress
from shapeshift.simulate.outcome import Outcome
from shapeshift.simulate.planner import Pace
from shapeshift.workloads.load import Load
from shapeshift.workloads.trace import Trace

BASE = "as stated"
"""The name of the system without [compare]'s differences."""
_PATHS = ("profile", "profiles", "trace", "candidates")
_LISTS = ("profiles",)


class System(Protocol):
    """What serves a load."""

    def serve(self, trace: Trace, progress: Progress | None = None) -> Outcome:
        """Raises InvalidInputError for a trace that it cannot serve."""
        ...


SYSTEMS: Choices[Any] = Choices(
    "technique",
    {
        "polymorph": "shapeshift.simulate.systems:TextSystem",
        "token_adapt": "shapeshift.simulate.systems:ImageSystem",
        "fused_decode": "shapeshift.simulate.fused_decode:DecodeSystem",
        "adapter_cache": "shapeshift.simulate.systems:AdapterSystem",
        "cascade": "shapeshift.simulate.cascade:CascadeSystem",
    },
)
"""Each a class whose `read(values)` makes a `System`, and whose `SETTINGS` are dataclasses of all values."""


@dataclass(frozen=True)
class Scenario:
    """A load, and the systems that serve it, by name."""

    load: Load
    systems: Mapping[str, System]
    seed: int = 0


def read(path: Path, load: Load | None = None) -> Scenario:
    """The scenario in the file `path`, with another load if given. Raises ShapeshiftError naming file and field."""
    with named(str(path)):
        return _parse(read_toml(path), path.parent, load)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises ShapeshiftError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeshiftError(f"it cannot be read: {error}") from None


def seed_of(data: Mapping[str, Any]) -> int:
    """The seed of a scenario. Raises InvalidInputError."""
    seed = data.get("seed", 0)
    require(type(seed) is int and seed >= 0, "seed", seed, "a whole number of at least 0")
    return int(seed)


def _parse(data: Mapping[str, Any], folder: Path, load: Load | None) -> Scenario:
    settings.refuse_unknown(data, ("seed", "load", "sidecar", "tasks", "compare", *SYSTEMS))
    techniques = [name for name in SYSTEMS if name in data]
    require(len(techniques) == 1, "technique", techniques, f"exactly one section of [{'], ['.join(SYSTEMS)}]")
    seed = seed_of(data)
    (technique,) = techniques
    kind = SYSTEMS[technique]
    sidecar = (Pace,) if technique == "polymorph" else ()
    base = {
        **texts(data.get("sidecar", {}), "sidecar", sidecar, folder),
        **texts(data[technique], technique, kind.SETTINGS, folder),
    }
    tasks = data.get("tasks", {})
    require(not tasks or technique == "token_adapt", "tasks", technique, "only with [token_adapt]")
    for name, accuracy in table(tasks, "tasks").items():
        for gamma, share in table(accuracy, f"tasks.{name}").items():
            is_share = isinstance(share, int | float) and 0 <= share <= 1
            require(is_share, f"tasks.{name}.{gamma}", share, "an accuracy, 0 to 1")
    systems = {BASE: base}
    for name, different in table(data.get("compare", {}), "compare").items():
        systems[name] = {**base, **texts(different, f"compare.{name}", (*kind.SETTINGS, *sidecar), folder)}
    read_systems = {}
    for name, values in systems.items():
        with named(f"[{technique}]" if name == BASE else f"[compare.{name}]"):
            read_systems[name] = kind.read(values, tasks) if tasks else kind.read(values)
    return Scenario(load or load_of(data.get("load", {}), folder), read_systems, seed)


def load_of(data: Any, folder: Path) -> Load:
    """The load that a section [load] states. Raises ShapeshiftError."""
    values = texts(data, "load", (Load,), folder)
    if values.get("lengths", "").endswith(".csv"):
        values["lengths"] = str(folder / values["lengths"])
    with named("[load]"):
        return settings.read(Load, values)


def texts(data: Any, section: str, classes: Sequence[type], folder: Path) -> dict[str, str]:
    """The values of a section as texts, as in config.pbtxt."""
    with named(f"[{section}]"):
        settings.refuse_unknown(table(data), settings.names(*classes))
        values = {name: _text(name, value) for name, value in data.items()}
        for name in [name for name in _PATHS if values.get(name)]:
            parts = values[name].split(",") if name in _LISTS else [values[name]]
            values[name] = ",".join(str(folder / part) for part in parts)
        return values


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(_text(name, one) for one in value)
    require(isinstance(value, str | int | float), name, value, "a text, a number, true, false or a list of them")
    return str(value)


def table(data: Any, name: str = "section") -> Mapping[str, Any]:
    """A table of a file. Raises InvalidInputError."""
    require(isinstance(data, Mapping), name, data, "a table: [section], and below it name = value")
    return data  # type: ignore[no-any-return]


@contextmanager
def named(place: str) -> Iterator[None]:
    """An InvalidInputError becomes a ShapeshiftError that names the place."""
    try:
        yield
    except ShapeshiftError as error:
        raise ShapeshiftError(f"{place}: {error}") from None
