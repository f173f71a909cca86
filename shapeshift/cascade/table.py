"""The candidate table of one task: which models there are, and how each cascade of them did when it was profiled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.cascade import route
from shapeshift.cascade.select import Measured
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.policy import Check, Optional, boolean, integer, list_of, nullable, number, one_of, record, text

FORMAT = 1
KINDS = ("classification", "regression")


@dataclass(frozen=True)
class LevelModel:
    """A model that a level may be.

    name: of the Triton model, and of its folder of engines; checkpoint_sha256: what those compute (empty: not known);
    accuracy: 0 to 1; latency_ms: mean engine time of one text; temperature: calibrates its confidence;
    ece: expected calibration error with it, on held-out data; outputs: those that it has, LOGITS among them.
    """

    name: str
    checkpoint_sha256: str
    accuracy: float
    latency_ms: float
    temperature: float
    ece: float
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Gap:
    """What is decided between a level and the next: the rule of Eq. 4, alpha of Eq. 5 (0: no pruning), w of Eq. 6.

    temperature: calibrates the ensemble behind this gap; agreement: the weights of a regression's confidence.
    """

    c: float
    k: float
    algorithm: str
    alpha: float
    w: float
    temperature: float = 1.0
    agreement: tuple[float, ...] = ()

    @property
    def rule(self) -> route.Rule:
        return route.Rule(self.c, self.k, self.algorithm)


@dataclass(frozen=True)
class Candidate:
    """A cascade of models with its settings, as profiled.

    accuracy: 0 to 1; latency_ms, p75_ms, p99_ms: of one query, engine and control time; shares: of the queries that
    each level answers; mean_confidence: of the first level's answers; pruned: share of the words that the last level
    was spared.
    """

    name: str
    levels: tuple[str, ...]
    gaps: tuple[Gap, ...]
    accuracy: float
    latency_ms: float
    p75_ms: float
    p99_ms: float
    model_latencies: tuple[float, ...]
    shares: tuple[float, ...]
    mean_confidence: float
    pruned: float

    @property
    def measured(self) -> Measured:
        """As `select.select` takes it."""
        return Measured(self.name, self.accuracy, self.latency_ms, self.p75_ms, self.model_latencies)


@dataclass(frozen=True)
class Table:
    """One task. labels: names of the classes, one for a regression; made: how, where and from what."""

    task: str
    kind: str
    labels: tuple[str, ...]
    pairs: bool
    tolerance: float
    made: Mapping[str, Any]
    models: tuple[LevelModel, ...]
    candidates: tuple[Candidate, ...]
    format: int = FORMAT

    @property
    def is_regression(self) -> bool:
        return self.kind == "regression"

    def model(self, name: str) -> LevelModel:
        """The model of that name, which every level of a candidate has."""
        return next(one for one in self.models if one.name == name)

    def candidate(self, name: str) -> Candidate:
        """The candidate of that name; NotFoundError with the known ones."""
        for one in self.candidates:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in self.candidates) or "none"
        raise NotFoundError(f"candidate: no {name!r} for task {self.task}; known: {known}")

    def as_json(self) -> str:
        """The text of the table's file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read(path: Path) -> Table:
    """The table in the file `path`; InvalidInputError naming the field that is not as it should be."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidInputError("candidate table", str(path), f"a readable file ({error.strerror})") from None
    except ValueError as error:
        raise InvalidInputError("candidate table", str(path), f"JSON ({error})") from None


def parse(data: Any) -> Table:
    """The table in JSON values; raises as `read`."""
    table: Table = _TABLE("table", data)
    names = [one.name for one in table.models]
    for kind, given in (("models", names), ("candidates", [one.name for one in table.candidates])):
        if len(set(given)) < len(given):
            raise InvalidInputError(f"table.{kind}", given, "names that stand only once")
    for candidate in table.candidates:
        for level in candidate.levels:
            if level not in names:
                raise InvalidInputError(f"candidate {candidate.name}", level, f"one of models ({', '.join(names)})")
        for field, values, wanted in (
            ("gaps", candidate.gaps, len(candidate.levels) - 1),
            ("shares", candidate.shares, len(candidate.levels)),
            ("model_latencies", candidate.model_latencies, len(candidate.levels)),
        ):
            if len(values) != wanted:
                raise InvalidInputError(f"candidate {candidate.name}.{field}", len(values), f"{wanted} of them")
        if table.is_regression and not all(gap.agreement for gap in candidate.gaps):
            raise InvalidInputError(f"candidate {candidate.name}", "no agreement", "weights, for a regression")
    return table


def _anything(name: str, value: Any) -> Any:
    return value


def _tuple_of(check: Check, least: int = 0) -> Check:
    as_list = list_of(check, least)
    return lambda name, value: tuple(as_list(name, value))


def _built(made_by: Callable[..., Any], **fields: Check | Optional) -> Check:
    return record(fields, made_by)


_SHARE = number(minimum=0, maximum=1)
_MS = number(minimum=0)
_MODEL = _built(
    LevelModel,
    name=text,
    checkpoint_sha256=text,
    accuracy=number(),
    latency_ms=_MS,
    temperature=number(above=0),
    ece=_SHARE,
    outputs=_tuple_of(text, 1),
)
_GAP = _built(
    Gap,
    c=_SHARE,
    k=_MS,
    algorithm=one_of(*route.ALGORITHMS),
    alpha=number(minimum=0),
    w=_SHARE,
    temperature=Optional(number(above=0), 1.0),
    agreement=Optional(_tuple_of(number()), ()),
)
_CANDIDATE = _built(
    Candidate,
    name=text,
    levels=_tuple_of(text, 1),
    gaps=_tuple_of(_GAP),
    accuracy=number(),
    latency_ms=_MS,
    p75_ms=_MS,
    p99_ms=_MS,
    model_latencies=_tuple_of(_MS),
    shares=_tuple_of(_SHARE),
    mean_confidence=_SHARE,
    pruned=_SHARE,
)
_TABLE = _built(
    Table,
    format=integer(FORMAT, FORMAT),
    task=text,
    kind=one_of(*KINDS),
    labels=_tuple_of(text, 1),
    pairs=boolean,
    tolerance=number(minimum=0),
    made=nullable(_anything),
    models=_tuple_of(_MODEL),
    candidates=_tuple_of(_CANDIDATE),
)
