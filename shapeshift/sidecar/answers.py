"""Whether models still answer as they should: now and then one question to an idle model, whose answer is known.

A text model, and each of its workers, is asked what its build has kept, and its answer held against the reference
model's. Where nothing is kept, the first answer since the model, its configuration and its registry are what they are
counts as right: this finds what changes while a model serves, not what was wrong from the start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.health import DeadModel
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import RUNNING, WAITING, MetricsPage, gauge
from shapeshift.sidecar.servers import Ask, Changes
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.metrics import Heartbeats

REFERENCE = "reference.json"
_TIMEOUT_S = 10.0
_MIN_COSINE = 0.999
# Of a model; adapters and tasks come and go.
_MOST_FIRST = 16
_DESCRIPTION = "DESCRIPTION"
# What a model chose, and must be the same for two of its answers to be compared.
_CHOICES = ("GAMMA",)
# Of a cascade the first level answers: the others are models of their own, whose engines its description does not name.
_FIRST_LEVEL = {"level": "1"}
_PARAMETERS, _MANIFEST, _GENERATION = "parameters", "manifest_sha256", "generation"
_FRONT, _BIN = "worker_of", "bin"

Arrays = Mapping[str, NDArray[Any]]


def _text(*values: str) -> NDArray[np.object_]:
    return np.array([value.encode() for value in values], dtype=object)


# By an input of the model: what it is asked, and which outputs are answers. Greedy tokens are determined.
_QUESTIONS: Mapping[str, tuple[Arrays, tuple[str, ...]]] = {
    "TEXT": ({"TEXT": _text("a book about the sea")[None]}, ("EMBEDDING", "LOGITS", "LABEL")),
    "PIXELS": ({"PIXELS": (np.arange(48, dtype=np.uint8) * 5).reshape(1, 4, 4, 3)}, ("LABEL", "PROBABILITIES")),
    "text_input": (
        {
            "text_input": _text("Once upon a time"),
            "max_tokens": np.array([8], np.int32),
            "temperature": np.array([0], np.float32),
        },
        ("text_output",),
    ),
}


@dataclass(frozen=True)
class Question:
    """What a model is asked.

    expected: what it should answer; None: what it answered first with this `config`, the same description and the same
    outputs `others`.
    """

    inputs: Arrays
    outputs: tuple[str, ...]
    others: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    expected: Arrays | None = None
    min_cosine: float = _MIN_COSINE


class AnswerCheck:
    """One thread calls `step`, once a second."""

    def __init__(
        self,
        settings: SidecarSettings,
        control: Changes,
        ask: Ask,
        actuator: Actuator,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._control = control
        self._ask = ask
        self._actuator = actuator
        self._journal = journal
        self._clock = clock
        self._heartbeats = Heartbeats[int]()
        # By model: when it was asked last, and its first answers by what they depend on.
        self._asked_at: dict[str, float] = {}
        self._first: dict[str, dict[str, Arrays]] = {}
        # Spent on questions in this step.
        self._took_s = 0.0
        # Models whose last answer was wrong, and whether they were loaded again since.
        self._wrong: dict[str, bool] = {}
        self._next = clock() + settings.check_seconds

    def step(self, page: MetricsPage) -> None:
        """Ask one idle model, if it is time. A model that does not answer, or refuses, is left to the health loop."""
        beats = page.heartbeats()
        living = self._heartbeats.living({pid: count for counts in beats.values() for pid, count in counts.items()})
        if self._clock() < self._next:
            return
        busy = self._actuator.changing
        # A process that does not live has left its series: its model may be unloaded, or the page old.
        alive = [model for model, counts in beats.items() if model not in busy and living & counts.keys()]
        idle = [model for model in alive if not _load(page, model, living)]
        for model in sorted(idle, key=lambda name: self._asked_at.get(name, 0.0)):
            self._asked_at[model], self._took_s = self._clock(), 0.0
            try:
                question = self._question(model)
                if question is None:
                    continue
                self._check(model, question)
            except ShapeshiftError as error:
                self._journal.log_once("answer", model, f"not checked: {error}")
            self._next = self._clock() + max(self._settings.check_seconds, self._took_s / self._settings.check_share)
            return

    def _check(self, model: str, question: Question) -> None:
        # A process that is replaced takes its counts along: the first question to its successor says it once more.
        differs = self._differs(model, question, "wrong" if model in self._wrong else "right")
        if differs:
            # Once more, so that no chance reloads a model.
            differs = self._differs(model, question, "wrong")
        if not differs:
            if self._wrong.pop(model, None) is not None:
                self._journal.log("answer", model, "answers as it should again")
        elif self._wrong.get(model):
            self._journal.log_once("answer", model, f"still differs after a reload: {differs}", logging.ERROR)
        else:
            if model not in self._wrong:
                self._journal.clear("answer", model)
                self._journal.log("answer", model, f"differs: {differs}", logging.ERROR)
            # A sidecar that is frozen, or a load that fails: it is tried at the next wrong answer.
            self._wrong[model] = self._actuator.reload(model, DeadModel("answers differ", False))
            if self._wrong[model]:
                # It comes next.
                self._asked_at.pop(model)
        self._journal.update_status(wrong_answers=sorted(self._wrong))

    def _differs(self, model: str, question: Question, before: str) -> str:
        """In what the model's answer differs from the right one; empty: in nothing."""
        # Described before it answers: where its registry changes in between, the second answer is compared anew.
        described = {} if question.expected else self._timed(model, question.inputs, (_DESCRIPTION,), {})
        names = (*question.outputs, *question.others)
        answer = self._timed(model, question.inputs, names, {**question.parameters, "check": before})
        right = question.expected
        if right is None:
            depends = [*described.values(), *(answer[name] for name in question.others if name in answer)]
            first = self._first.setdefault(model, {})
            if len(first) >= _MOST_FIRST:
                first.clear()
            right = first.setdefault(str([question.config, *(value.tolist() for value in depends)]), answer)
        return next(filter(None, (_difference(name, answer, right, question) for name in question.outputs)), "")

    def _timed(self, model: str, inputs: Arrays, outputs: tuple[str, ...], parameters: Mapping[str, str]) -> Arrays:
        began = self._clock()
        try:
            return self._ask(model, inputs, outputs, parameters, _TIMEOUT_S)
        finally:
            self._took_s += self._clock() - began

    def _question(self, model: str) -> Question | None:
        config = self._control.config(model)
        parameters = dict(config.get(_PARAMETERS, {}))
        values = {name: str(parameters.get(name, {}).get("string_value", "")) for name in (_MANIFEST, _FRONT, _BIN)}
        if "forward_to" in parameters:
            return None
        if values[_FRONT]:
            reference = self._reference(values[_FRONT], values[_MANIFEST])
            return None if reference is None else _of_worker(reference, int(values[_BIN] or 0))
        outputs = [str(output["name"]) for output in config.get("output", ())]
        reference = self._reference(model, values[_MANIFEST])
        if reference is not None and {*reference.outputs} <= {*outputs}:
            return reference
        others = tuple(name for name in _CHOICES if name in outputs)
        choice = _FIRST_LEVEL if "LEVEL" in outputs else {}
        # A reload changes nothing but this.
        parameters.pop(_GENERATION, None)
        loaded = json.dumps({**config, _PARAMETERS: parameters}, sort_keys=True)
        inputs = {str(one["name"]) for one in config.get("input", ())}
        for name, (arrays, answers) in _QUESTIONS.items():
            compared = tuple(answer for answer in answers if answer in outputs)
            if name in inputs and compared:
                return Question(arrays, compared, others, choice, loaded)
        return None

    def _reference(self, model: str, manifest: str) -> Question | None:
        """What the build of the model has kept, if it is here and is that of the engines that are loaded."""
        for folder in self._settings.repositories:
            with contextlib.suppress(OSError, ValueError, KeyError):
                values = json.loads((Path(folder) / model / REFERENCE).read_text())
                if values[_MANIFEST] != manifest:
                    return None
                expected = {name: np.array(rows, np.float32) for name, rows in values["outputs"].items()}
                inputs = _padded(values["ids"])
                least = float(values["min_cosine"])
                return Question(inputs, tuple(expected), expected=expected, min_cosine=least) if expected else None
        return None


def _load(page: MetricsPage, model: str, living: Collection[int]) -> float:
    """What waits and runs in the model's living processes."""
    return sum(sum(gauge(model, name, page, living).values()) for name in (WAITING, RUNNING))


def _of_worker(reference: Question, longest: int) -> Question | None:
    """What a worker is asked: the longest text that it takes of those that its front is asked; None: it takes none."""
    ids, lengths = reference.inputs["INPUT_IDS"], reference.inputs["ATTENTION_MASK"].sum(1).tolist()
    taken = [row for row, length in enumerate(lengths) if not longest or length <= longest]
    if not taken or reference.expected is None:
        return None
    row = max(taken, key=lengths.__getitem__)
    inputs = {"INPUT_IDS": ids[row, : lengths[row]], "LENGTHS": np.array([lengths[row]], np.int32)}
    expected = {name: rows[row : row + 1] for name, rows in reference.expected.items()}
    return replace(reference, inputs=inputs, expected=expected)


def _padded(rows: Sequence[Sequence[int]]) -> Arrays:
    ids, mask = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return {"INPUT_IDS": ids, "ATTENTION_MASK": mask}


def _difference(name: str, answer: Arrays, right: Arrays, question: Question) -> str:
    if name not in answer or name not in right or answer[name].shape != right[name].shape:
        return f"{name} is missing, or has another shape"
    one, other = answer[name], right[name]
    if one.dtype.kind != "f":
        return "" if np.array_equal(one, other) else f"{name} is {one.ravel()[:3].tolist()}"
    one, other = one.reshape(len(one), -1).astype(float), other.reshape(len(other), -1).astype(float)
    # As a build verifies what is not normalised: magnitudes count, too.
    alike = 2 * (one * other).sum(1) / np.maximum((one * one).sum(1) + (other * other).sum(1), 1e-30)
    worst, least = float(alike.min()), question.min_cosine
    return "" if worst >= least else f"{name}: cosine {worst:.6f}, must be at least {least:g}"
