"""Checking answers: which model is asked when, and what follows from its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shapeshift.errors import OverloadedError
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.answers import AnswerCheck
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import RUNNING, MetricsPage
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.triton.metrics import Samples
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer, samples
from tests.sidecar.fleet import single

PERIOD_S = 60.0
RIGHT = np.array([[3.0, 4.0, 0.0]], np.float32)
REFERENCE = {
    "ids": [[1, 5, 2]],
    "outputs": {"EMBEDDING": RIGHT.tolist()},
    "min_cosine": 0.999,
    "manifest_sha256": "engines 1",
}


class Case:
    """A check of models that embed, of which `m` is one; a step each second. answers: what each model says."""

    def __init__(self, folder: Path, *models: str, reference: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.server = FakeServer()
        self.answers: dict[str, NDArray[Any]] = {}
        self.description = "engines 1"
        self.took_s, self.now = 0.001, 0.0
        self.running: dict[str, float] = {}
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []
        self.levels: set[str] = set()
        # Of the last question.
        self.inputs: Mapping[str, NDArray[Any]] = {}
        self.blocked = ""
        self.ended: set[str] = set()
        # Called after each answer, with the name of an output.
        self.then: Callable[[str], None] = lambda output: None
        self.log: list[str] = []
        self.status: dict[str, Any] = {}
        for model in models or ("m",):
            self.answers[model] = RIGHT
            named = [{"name": name} for name in ("TEXT", "EMBEDDING", "DESCRIPTION")]
            parameters = {"manifest_sha256": {"string_value": "engines 1"}}
            config = {"name": model, "parameters": parameters, "input": named[:1], "output": named[1:]}
            self.server.files[model] = self.server.loaded[model] = config
            (folder / model).mkdir()
            if reference is not None:
                (folder / model / "reference.json").write_text(json.dumps(reference))
        journal = Journal(logger(self.log), lambda values: self.status.update(values), {})
        settings = SidecarSettings(repositories=(folder,), check_seconds=PERIOD_S)
        control = single(self.server).control
        actuator = Actuator(control, (), journal, lambda: self.blocked)
        self.check = AnswerCheck(settings, control, self.ask, actuator, journal, lambda: self.now)

    def ask(
        self,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        parameters: Mapping[str, str],
        timeout_s: float,
    ) -> dict[str, NDArray[Any]]:
        self.now += self.took_s
        if tuple(outputs) == ("DESCRIPTION",):
            answer = {"DESCRIPTION": np.array([self.description.encode()], dtype=object)}
            self.then("DESCRIPTION")
            return answer
        self.levels.add(parameters.get("level", ""))
        self.inputs = inputs
        self.asked.append((name, parameters["check"], tuple(inputs)))
        if name not in self.answers:
            raise OverloadedError("full")
        answer = {"EMBEDDING": self.answers[name]}
        self.then("EMBEDDING")
        return answer

    def steps(self, seconds: float) -> list[str]:
        """The models that were asked meanwhile."""
        before = len(self.asked)
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            page: Samples = {}
            for pid, model in enumerate(self.server.loaded, 1):
                page |= samples(model, pid, 1.0 if model in self.ended else self.now)
                labels = frozenset({("model", model), ("pid", str(pid))})
                page[RUNNING, labels] = self.running.get(model, 0.0)
            self.check.step(MetricsPage(page, self.now))
        return [name for name, _, _ in self.asked[before:]]

    def logged(self, text: str) -> int:
        return sum(text in line for line in self.log)

    @property
    def loads(self) -> list[str]:
        return [name for kind, name, _ in self.server.calls if kind == "load"]


def test_one_idle_model_is_asked_in_each_period_the_longest_unasked_first(tmp_path: Path) -> None:
    case = Case(tmp_path, "a", "b", "c")
    case.running = {"b": 1.0}
    assert case.steps(PERIOD_S - 1) == []
    assert case.steps(3 * PERIOD_S + 8) == ["a", "c", "a", "c"]


def test_questions_take_a_thousandth_of_the_time_at_most(tmp_path: Path) -> None:
    case = Case(tmp_path, reference=REFERENCE)
    case.took_s = 0.25
    assert case.steps(PERIOD_S + 1) == ["m"]
    assert case.steps(case.took_s / SidecarSettings.check_share - 2) == []
    assert case.steps(4) == ["m"]


def test_what_the_build_has_kept_is_asked_and_its_tolerance_holds(tmp_path: Path) -> None:
    case = Case(tmp_path, reference=REFERENCE)
    case.answers["m"] = RIGHT * np.float32(1.001)
    case.steps(PERIOD_S + 1)
    assert case.asked == [("m", "right", ("INPUT_IDS", "ATTENTION_MASK"))]
    assert case.loads == []


def test_a_wrong_answer_is_asked_for_again_then_the_model_is_reloaded_once(tmp_path: Path) -> None:
    case = Case(tmp_path, reference=REFERENCE)
    case.answers["m"] = RIGHT[:, ::-1]
    case.steps(PERIOD_S + 1)
    assert [before for _, before, _ in case.asked] == ["right", "wrong"]
    assert case.loads == ["m"] and case.status["wrong_answers"] == ["m"]
    assert case.logged("m: differs: EMBEDDING: cosine") == 1
    case.steps(3 * PERIOD_S)
    assert case.loads == ["m"]
    assert case.logged("still differs after a reload") == 1
    case.answers["m"] = RIGHT
    case.steps(PERIOD_S + 1)
    assert [before for _, before, _ in case.asked[-1:]] == ["wrong"]
    assert case.status["wrong_answers"] == [] and case.logged("answers as it should again") == 1


def test_without_a_reference_the_first_answer_counts_until_the_model_is_another_one(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.steps(PERIOD_S + 1)
    case.answers["m"], case.description = RIGHT[:, ::-1], "engines 2"
    case.steps(PERIOD_S + 1)
    assert case.loads == []
    case.answers["m"] = RIGHT
    case.steps(PERIOD_S + 1)
    assert case.loads == ["m"]


@pytest.mark.parametrize(("bin_edge", "text"), [("3", 0), ("4", 1), ("0", 1), ("2", None)])
def test_a_worker_is_asked_the_longest_text_that_it_takes(bin_edge: str, text: int | None, tmp_path: Path) -> None:
    ids, vectors = [[1, 5, 2], [1, 5, 6, 2]], [*RIGHT.tolist(), [0.0, 0.0, 1.0]]
    kept = {**REFERENCE, "ids": ids, "outputs": {"EMBEDDING": vectors}}
    case = Case(tmp_path, "m", "m_w00", reference=kept)
    worker = case.server.loaded["m_w00"]
    worker["parameters"] |= {"worker_of": {"string_value": "m"}, "bin": {"string_value": bin_edge}}
    case.answers["m_w00"] = np.array([vectors[text or 0]], np.float32)
    case.answers["m"] = np.array(vectors, np.float32)
    asked = case.steps(2 * PERIOD_S + 5)
    assert asked == (["m", "m"] if text is None else ["m", "m_w00"]) and case.loads == []
    if text is not None:
        assert case.asked[-1] == ("m_w00", "right", ("INPUT_IDS", "LENGTHS"))
        assert case.inputs["LENGTHS"].tolist() == [len(ids[text])]
        assert case.inputs["INPUT_IDS"].tolist() == ids[text]
        case.answers["m_w00"] = -case.answers["m_w00"]
        case.steps(2 * PERIOD_S + 5)
        assert case.loads == ["m_w00"]


def test_a_model_that_refuses_is_not_wrong(tmp_path: Path) -> None:
    case = Case(tmp_path, reference=REFERENCE)
    del case.answers["m"]
    case.steps(PERIOD_S + 1)
    assert case.loads == [] and case.logged("not checked: full") == 1


def test_an_answer_that_is_no_number_is_wrong(tmp_path: Path) -> None:
    case = Case(tmp_path, reference=REFERENCE)
    case.answers["m"] = RIGHT * np.float32(np.nan)
    case.steps(PERIOD_S + 1)
    assert case.loads == ["m"]


def test_a_model_that_stays_wrong_keeps_no_other_from_being_asked(tmp_path: Path) -> None:
    case = Case(tmp_path, "a", "b", reference=REFERENCE)
    case.answers["a"] = RIGHT[:, ::-1]
    asked = case.steps(6 * PERIOD_S + 20)
    assert asked[:4] == ["a"] * 4, "after its reload it is asked next"
    assert asked[4:] == ["b", "a", "a", "b", "a", "a"]


def test_a_wrong_model_is_reloaded_once_that_is_allowed(tmp_path: Path) -> None:
    case = Case(tmp_path, reference=REFERENCE)
    case.answers["m"], case.blocked = RIGHT[:, ::-1], "frozen"
    case.steps(2 * PERIOD_S + 3)
    assert case.loads == [] and case.logged("differs: EMBEDDING") == 1 and case.logged("still differs") == 0
    case.blocked = ""
    case.steps(PERIOD_S + 1)
    assert case.loads == ["m"]


def test_engines_that_were_built_anew_do_not_judge_those_that_are_loaded(tmp_path: Path) -> None:
    case = Case(tmp_path, reference={**REFERENCE, "manifest_sha256": "engines 2"})
    case.answers["m"] = RIGHT[:, ::-1]
    case.steps(3 * PERIOD_S)
    assert case.loads == [] and {inputs for *_, inputs in case.asked} == {("TEXT",)}


@pytest.mark.parametrize("output", ["DESCRIPTION", "EMBEDDING"])
def test_a_registry_that_changes_while_a_model_is_asked_makes_no_answer_wrong(output: str, tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.steps(PERIOD_S + 1)

    def change(name: str) -> None:
        if name == output:
            case.answers["m"], case.description = RIGHT[:, ::-1], "registry 2"

    case.then = change
    case.steps(3 * PERIOD_S)
    assert case.description == "registry 2" and case.loads == []


def test_the_first_answer_counts_until_the_configuration_is_another_one(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.steps(PERIOD_S + 1)
    case.answers["m"] = RIGHT[:, ::-1]
    case.server.loaded["m"]["parameters"]["kv_precision"] = {"string_value": "int8"}
    case.steps(PERIOD_S + 1)
    assert case.loads == []
    case.server.loaded["m"]["parameters"]["generation"] = {"string_value": "7"}
    case.answers["m"] = RIGHT
    case.steps(PERIOD_S + 1)
    assert case.loads == ["m"]


def test_the_first_level_of_a_cascade_answers(tmp_path: Path) -> None:
    """Its description does not name the engines of the others."""
    case = Case(tmp_path)
    case.steps(PERIOD_S + 1)
    assert case.levels == {""}
    case.server.loaded["m"]["output"].append({"name": "LEVEL"})
    case.steps(PERIOD_S + 1)
    assert case.levels == {"", "1"}


def test_a_model_without_a_living_process_is_not_asked(tmp_path: Path) -> None:
    case = Case(tmp_path, "a", "b")
    case.ended = {"a"}
    assert case.steps(2 * PERIOD_S + 2) == ["b", "b"]


def test_a_question_without_an_answer_takes_its_share_of_the_time_too(tmp_path: Path) -> None:
    case = Case(tmp_path, reference=REFERENCE)
    del case.answers["m"]
    case.took_s = 10.0
    assert case.steps(PERIOD_S + 1) == ["m"]
    assert case.steps(100 * PERIOD_S) == []
