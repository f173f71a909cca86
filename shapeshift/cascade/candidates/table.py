"""The candidate table of one task: its models, and what profiling measured of each cascade of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapeshift.cascade.policy import routing
from shapeshift.errors import InvalidInputError, NotFoundError
from shapeshift.policy_api import (
    Check,
    OptionalField,
    boolean,
    integer,
    list_of,
    nullable,
    number,
    one_of,
    record,
    text,
)

FORMAT = 1
KINDS = ("classification", "regression")


@dataclass(frozen=True)
class LevelModel:
    """A model that can be a level.

    name: of the Triton model and of its folder of engines; checkpoint_sha256: of its engines' checkpoint (empty:
    unknown); accuracy: 0 to 1, on held-out data; latency_ms: mean engine time of one text; temperature: calibrates its
    confidence; ece: expected calibration error on held-out data; outputs: of the model, LOGITS among them.
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
    """The settings between a level and the next: c and k of Eq. 4, alpha of Eq. 5 (0: no pruning), w of Eq. 6.

    algorithm: one of `routing.ALGORITHMS`; temperature: calibrates the ensemble after the next level; agreement: the
    weights of a regression's confidence, see `calibration.fit_agreement`.
    """

    c: float
    k: float
    algorithm: str
    alpha: float
    w: float
    temperature: float = 1.0
    agreement: tuple[float, ...] = ()

    @property
    def rule(self) -> routing.RoutingRule:
        return routing.RoutingRule(self.c, self.k, self.algorithm)


@dataclass(frozen=True)
class Candidate:
    """A cascade of models with its settings, as profiled.

    levels: models by name; gaps: between them; accuracy: 0 to 1; latency_ms (mean), p75_ms, p99_ms: engine and control
    time of one text; model_latencies: mean engine time of each level, ms; shares: of the texts that each level answers;
    mean_confidence: of the first level's answers; pruned: share of the words that the last level does not read;
    accuracy_bound: the lower bound of the accuracy, which holds together with those of the other candidates with 95%
    confidence; None in a table that was written before bounds were measured.
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
    accuracy_bound: float | None = None

    @property
    def assured_accuracy(self) -> float:
        """The accuracy that a target is compared with: the lower bound; 0 without one."""
        return self.accuracy_bound or 0.0


@dataclass(frozen=True)
class CandidateTable:
    """One task. labels: names of the classes, one for a regression; pairs: whether each input is two texts; tolerance:
    of a regression; made: how, where and from what the table was made."""

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
        """The candidate of that name. Raises NotFoundError with the names that exist."""
        for one in self.candidates:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in self.candidates) or "none"
        raise NotFoundError(f"candidate: no {name!r} for task {self.task}; known: {names}")

    def as_json(self) -> str:
        """The text of the table's file; `read` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read(path: Path) -> CandidateTable:
    """The table in the file `path`. Raises InvalidInputError naming the invalid field."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidInputError("candidate table", str(path), f"a readable file ({error.strerror})") from None
    except ValueError as error:
        raise InvalidInputError("candidate table", str(path), f"JSON ({error})") from None


def parse(data: Any) -> CandidateTable:
    """The table in parsed JSON. Raises as `read`."""
    table: CandidateTable = _TABLE("table", data)
    names = [one.name for one in table.models]
    for kind, given in (("models", names), ("candidates", [one.name for one in table.candidates])):
        if len(set(given)) < len(given):
            raise InvalidInputError(f"table.{kind}", given, "each name once")
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
                raise InvalidInputError(f"candidate {candidate.name}.{field}", len(values), f"{wanted} values")
        if table.is_regression and not all(gap.agreement for gap in candidate.gaps):
            raise InvalidInputError(f"candidate {candidate.name}", "no agreement", "weights, for a regression")
    return table


def _anything(name: str, value: Any) -> Any:
    return value


def _tuple_of(check: Check, least: int = 0) -> Check:
    as_list = list_of(check, least)
    return lambda name, value: tuple(as_list(name, value))


def _built(made_by: Callable[..., Any], **fields: Check | OptionalField) -> Check:
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
    algorithm=one_of(*routing.ALGORITHMS),
    alpha=number(minimum=0),
    w=_SHARE,
    temperature=OptionalField(number(above=0), 1.0),
    agreement=OptionalField(_tuple_of(number()), ()),
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
    accuracy_bound=OptionalField(nullable(_SHARE), None),
)
_TABLE = _built(
    CandidateTable,
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
