"""The candidates of a task: its table of models and of cascades of them, and the registry that names what serves.

A registry's registry.json names the table and the serving candidate of each task. The file of a table has its hash in
its name and never changes: a reader of the old or the new registry.json finds what it names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shapeshift import files
from shapeshift.cascade.policy import pruning, routing
from shapeshift.cascade.policy.pruning import PrunedTexts
from shapeshift.cascade.policy.routing import Answer, Array, LevelOutput, agreement, combine, softmax
from shapeshift.engines import manifest
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError
from shapeshift.files import file_sha256
from shapeshift.registry import FILE, Registry
from shapeshift.settings import require

KIND = "candidates"
FORMAT = 1
KINDS = ("classification", "regression")
_REGISTER = "run `shapeshift cascade register` again"


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

    def __post_init__(self) -> None:
        require(self.temperature > 0, f"{self.name}.temperature", self.temperature, "above 0")


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

    def __post_init__(self) -> None:
        for name, value in (("c", self.c), ("w", self.w)):
            require(0 <= value <= 1, f"gap.{name}", value, "0 to 1")
        for name, value in (("k", self.k), ("alpha", self.alpha)):
            require(value >= 0, f"gap.{name}", value, "0 or more")
        require(self.temperature > 0, "gap.temperature", self.temperature, "above 0")
        algorithms = routing.ALGORITHMS
        require(self.algorithm in algorithms, "gap.algorithm", self.algorithm, f"one of {', '.join(algorithms)}")

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

    def __post_init__(self) -> None:
        require(bool(self.levels), f"candidate {self.name}.levels", self.levels, "at least one")
        for name, values, count in (
            ("gaps", self.gaps, len(self.levels) - 1),
            ("shares", self.shares, len(self.levels)),
            ("model_latencies", self.model_latencies, len(self.levels)),
        ):
            require(len(values) == count, f"candidate {self.name}.{name}", len(values), f"{count} values")

    @property
    def assured_accuracy(self) -> float:
        """The accuracy that a target is compared with: the lower bound; 0 without one."""
        return self.accuracy_bound or 0.0


@dataclass(frozen=True)
class CandidateTable:
    """One task. labels: names of the classes, one for a regression; pairs: whether each input is two texts; tolerance:
    of a regression; origin: how, where and from what the table was made, `made` in its file."""

    task: str
    kind: str
    labels: tuple[str, ...]
    pairs: bool
    tolerance: float
    origin: Mapping[str, Any] = field(metadata={"key": "made"})
    models: tuple[LevelModel, ...]
    candidates: tuple[Candidate, ...]
    format: int = FORMAT

    def __post_init__(self) -> None:
        require(self.format == FORMAT, "table.format", self.format, str(FORMAT))
        require(self.kind in KINDS, "table.kind", self.kind, f"one of {', '.join(KINDS)}")
        require(bool(self.labels), "table.labels", self.labels, "at least one")
        models, names = [one.name for one in self.models], [one.name for one in self.candidates]
        require(len({*models}) == len(models), "table.models", models, "each name once")
        require(len({*names}) == len(names), "table.candidates", names, "each name once")
        for one in self.candidates:
            for level in one.levels:
                require(level in models, f"candidate {one.name}", level, f"one of models ({', '.join(models)})")
            agreed = not self.is_regression or all(gap.agreement for gap in one.gaps)
            require(agreed, f"candidate {one.name}", "no agreement", "weights, for a regression")

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

    def check_engines(self, folder: Path, model: str, is_last: bool) -> Manifest:
        """The manifest of the engines in `folder`, of a level.

        Raises EngineError where they are not the engines that were profiled.
        """
        engines = manifest.load(folder)
        checkpoint = self.model(model).checkpoint_sha256
        if checkpoint and checkpoint != engines.checkpoint_sha256:
            raise EngineError(f"candidate table of {self.task}: {model} comes from another checkpoint; {_REGISTER}")
        outputs = [output.name for output in engines.outputs]
        needed = ["LOGITS", *(["EMBEDDING"] if self.is_regression and not is_last else [])]
        missing = [name for name in needed if name not in outputs]
        if missing:
            raise EngineError(
                f"{model} has no output {', '.join(missing)}; list it in its config.pbtxt and run `shapeshift engines`"
            )
        if len(engines.labels) != len(self.labels):
            expected = f"the candidate table of {self.task} has {len(self.labels)}"
            raise EngineError(f"{model} has {len(engines.labels)} labels, {expected}; {_REGISTER}")
        engines.check_files(folder, manifest.hashes_file(folder))
        return engines

    def as_json(self) -> str:
        """The text of the table's file; `read` reads it."""
        fields = {"made" if name == "origin" else name: value for name, value in dataclasses.asdict(self).items()}
        return json.dumps(fields, indent=1) + "\n"


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
    table: CandidateTable = _from_json(CandidateTable, data, "table")
    return table


# The registry.


@dataclass(frozen=True)
class Entry:
    """A task: the file of its table, the file's hash, the serving candidate, and whether a command has pinned it."""

    table: str
    sha256: str
    candidate: str
    pinned: bool = False

    def __post_init__(self) -> None:
        is_name = self.table == Path(self.table).name and not self.table.startswith(".")
        require(is_name, "table", self.table, "a plain file name")


@dataclass(frozen=True)
class ServingCandidate:
    """The candidate that serves a task, and its decisions. Levels count from 1. Any thread may use it.

    pinned: also where a table comes from another CPU, see `local_candidates`.
    """

    table: CandidateTable
    candidate: Candidate
    pinned: bool = field(default=False, compare=False)

    @property
    def num_levels(self) -> int:
        return len(self.candidate.levels)

    @cached_property
    def temperatures(self) -> Sequence[float]:
        """Of the levels."""
        return [self.table.model(name).temperature for name in self.candidate.levels]

    def answer(self, level: int, output: LevelOutput, ensemble: Array | None = None) -> tuple[Answer, Array]:
        """The answer after `level`, and the ensemble to pass in after the next level (Eq. 6).

        ensemble: None for the first level that answers the text.
        """
        gap = self.candidate.gaps[level - 2] if level > 1 else None
        if self.table.is_regression:
            number = output.logits if ensemble is None or gap is None else combine(ensemble, output.logits, gap.w)
            return Answer(number, self._confidence(level, output), level), number
        if ensemble is None or gap is None:
            probabilities = softmax(output.logits, self.temperatures[level - 1])
            return Answer(probabilities, float(probabilities.max()), level), softmax(output.logits)
        mixed = combine(ensemble, softmax(output.logits), gap.w)
        # For a softmax, the logarithm of probabilities is as good as logits.
        calibrated = softmax(np.log(np.maximum(mixed, 1e-30)), gap.temperature)
        return Answer(mixed, float(calibrated.max()), level), mixed

    def p_continue(self, level: int, output: LevelOutput) -> float:
        """The probability with which a text goes on after `level` (Eqs. 3 and 4)."""
        if level >= self.num_levels:
            return 0.0
        return routing.p_large(self._confidence(level, output), self.candidate.gaps[level - 1].rule)

    def prune(self, texts: Sequence[bytes], level: int, output: LevelOutput) -> PrunedTexts:
        """What the level after `level` reads (Eq. 5): the whole texts where `level` has no importance."""
        alpha = self.candidate.gaps[level - 1].alpha
        if not alpha or output.importance is None or output.offsets is None:
            return PrunedTexts(list(texts), 0)
        return pruning.prune_texts(texts, output.offsets, output.importance, alpha)

    def _confidence(self, level: int, output: LevelOutput) -> float:
        """That of a level alone; of a regression, in that the next level will agree."""
        if not self.table.is_regression:
            return float(softmax(output.logits, self.temperatures[level - 1]).max())
        # The last level has no next level to agree with.
        if level >= self.num_levels or output.embedding is None:
            return 1.0
        return agreement(output.embedding, self.candidate.gaps[level - 1].agreement)


def entries(folder: Path) -> dict[str, Entry]:
    """All tasks by name; empty where the folder has no registry. Raises InvalidInputError for a broken registry."""
    return {name: _entry(name, fields) for name, fields in Registry(folder, KIND).read().entries.items()}


def serving(folder: Path, task: str) -> ServingCandidate:
    """The table and candidate that serve `task`.

    Raises NotFoundError where the task has none, InvalidInputError for a table that no command has written.
    """
    tasks = entries(folder)
    if task not in tasks:
        names = ", ".join(tasks) or "none"
        raise NotFoundError(
            f"task: no candidates for {task!r} in {folder}; known: {names}; run `shapeshift cascade register`"
        )
    entry = tasks[task]
    path = folder / entry.table
    if not path.is_file():
        raise NotFoundError(f"candidate table {path} is missing; run `shapeshift cascade register`")
    require(file_sha256(path) == entry.sha256, "candidate table", str(path), f"unchanged; {_REGISTER}")
    table = read(path)
    require(table.task == task, "candidate table", table.task, f"a table of task {task}")
    return ServingCandidate(table, table.candidate(entry.candidate), entry.pinned)


def put(folder: Path, table: CandidateTable, candidate: str, pinned: bool) -> Path:
    """Write the table, and let `candidate` serve its task from now on. After an error all is as it was.

    Returns the file of the table.
    """
    is_name = bool(table.task) and table.task == Path(table.task).name and not table.task.startswith(".")
    require(is_name, "task", table.task, "a plain name")
    table.candidate(candidate)
    text = table.as_json()
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    file = folder / f"{table.task}-{sha256[:12]}.json"
    registry = Registry(folder, KIND)
    with registry.changing(file) as content:
        files.replace_text(file, text)
        before = content.entries.get(table.task, {}).get("table")
        registry.retire(content, before if isinstance(before, str) else None, keep=file.name)
        content.entries[table.task] = dataclasses.asdict(Entry(file.name, sha256, candidate, pinned))
        registry.sweep(content)
    return file


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    entry: Entry = _from_json(Entry, fields, f"{FILE} {name}")
    return entry


def _from_json(hint: Any, value: Any, name: str) -> Any:
    """`value`, of parsed JSON, as an instance of the type `hint`; a field's `key`, where it has one, is its name there.

    Raises InvalidInputError naming the field.
    """
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return None if value is None else _from_json(arguments[0], value, name)
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list), name, value, "a list")
        return tuple(_from_json(arguments[0], one, f"{name}[{index}]") for index, one in enumerate(value))
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, dict), name, value, "an object")
        hints = typing.get_type_hints(hint)
        fields = {field.metadata.get("key", field.name): field for field in dataclasses.fields(hint)}
        for key in value:
            require(key in fields, f"{name}.{key}", value[key], f"unknown key; known: {', '.join(fields)}")
        for key, field in fields.items():
            is_there = key in value or field.default is not dataclasses.MISSING
            require(is_there, f"{name}.{key}", None, "this key is required")
        content = {fields[key].name: (key, one) for key, one in value.items()}
        return hint(**{to: _from_json(hints[to], one, f"{name}.{key}") for to, (key, one) in content.items()})  # type: ignore[operator]
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        require(is_number, name, value, "a number")
        return float(value)
    kind = typing.get_origin(hint) or hint
    require(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), name, value, kind.__name__)
    return value
