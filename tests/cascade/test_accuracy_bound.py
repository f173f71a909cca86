"""The lower bounds of accuracies hold on new texts, whichever candidate is picked by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from shapeshift.cascade.candidates import Candidate
from shapeshift.cascade.policy import routing, selection
from shapeshift.cascade.policy.routing import softmax
from shapeshift.cascade.profiling.accuracy_bound import CONFIDENCE, accuracy_bound, clopper_pearson
from shapeshift.cascade.profiling.model_profile import ModelProfile, Task, profile_model, random_half
from shapeshift.cascade.profiling.observation import Observation
from shapeshift.cascade.profiling.search import CandidateSearch, Plan
from tests.sampling import few

DRAWS, COUNT, NEW_TEXTS, CLASSES = 100, 200, 10_000, 4
TARGET = 0.8


@pytest.mark.parametrize("risk", [0.05, 0.05 / 22])
@pytest.mark.parametrize("count", [1, 8, 40, 150])
def test_the_bound_is_that_of_clopper_and_pearson(count: int, risk: float) -> None:
    from scipy.stats import beta

    bounds = [clopper_pearson(right, count, risk) for right in range(count + 1)]
    rights = np.arange(1, count + 1)
    assert bounds == pytest.approx([0.0, *beta.ppf(risk, rights, count - rights + 1)], rel=1e-9)


@pytest.mark.parametrize("count", few((20, 150), (20,)))
@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.5, 1), (0, 0.95), (0.85, 1)])
def test_chances_between_zero_and_one_are_covered(count: int, low: float, high: float) -> None:
    """The chance of each text has one of two values, the distributions that reach any extreme; their mean is 0.9."""
    rng = np.random.default_rng(0)
    share = (0.9 - low) / (high - low)
    chances = np.where(rng.random((2000, count)) < share, high, low)
    found = np.array([accuracy_bound(row, 1) for row in chances])
    # 0.005 is the standard deviation of this estimate.
    assert np.mean(found <= 0.9) >= CONFIDENCE - 0.005


def test_the_bound_falls_with_the_number_that_is_compared() -> None:
    assert accuracy_bound(np.ones(100), 1) == math.floor(1e4 * 0.05 ** (1 / 100)) / 1e4
    assert accuracy_bound(np.ones(100), 10) < accuracy_bound(np.ones(100), 1)
    assert accuracy_bound(np.zeros(100), 1) == 0
    # 30 times 0.1 is not less than 3.
    assert accuracy_bound(np.full(30, 0.1), 1) == accuracy_bound(np.repeat([0.0, 1.0], [27, 3]), 1)


@dataclass(frozen=True)
class Population:
    """Texts without end, and two models that see the right class through noise; the small one is right less often."""

    truth: np.ndarray
    small: np.ndarray
    large: np.ndarray

    @staticmethod
    def draw(rng: np.random.Generator, count: int) -> Population:
        truth = rng.integers(0, CLASSES, count)
        logits = [2 * (rng.normal(size=(count, CLASSES)) + s * np.eye(CLASSES)[truth]) for s in (1.6, 1.9)]
        return Population(truth, *logits)

    def accuracy(self, candidate: Candidate, temperatures: dict[str, float]) -> float:
        """The accuracy of a candidate with the algorithm `cut` on these texts."""
        by_name = {"small": self.small, "large": self.large}
        first = by_name[candidate.levels[0]]
        answers = softmax(first)
        for gap in candidate.gaps:
            mixed = routing.combine(answers, softmax(self.large), gap.w)
            onward = routing.confidence(first, temperatures["small"]) <= gap.c
            answers = np.where(onward[:, None], mixed, answers)
        return float((answers.argmax(axis=1) == self.truth).mean())


def _search(sample: Population) -> CandidateSearch:
    task = Task([[b"x"]] * COUNT, sample.truth, random_half(COUNT))

    def profiled(name: str, logits: np.ndarray, ms: float) -> ModelProfile:
        return profile_model(name, Observation(logits, np.full(COUNT, ms), [], [], None), task)

    models = [profiled("small", sample.small, 1.0), profiled("large", sample.large, 8.0)]
    return CandidateSearch(task, models, lambda name, texts, what: pytest.fail(what), algorithms=["cut"])


def test_what_is_picked_by_its_bound_keeps_its_promise() -> None:
    """Many samples of one population: the fastest candidate that promises TARGET is picked, by the accuracy on the
    texts that chose it, and by the lower bound."""
    rng = np.random.default_rng(11)
    new_texts = Population.draw(rng, NEW_TEXTS)
    missed_by_trial = missed_by_bound = any_bound_missed = met = 0
    for _ in range(DRAWS):
        search = _search(Population.draw(rng, COUNT))
        by_name = {model.name: model for model in search.models}
        temperatures = {name: model.temperature for name, model in by_name.items()}
        scored = search.candidates()
        truths = {one.name: new_texts.accuracy(one, temperatures) for one in scored}
        tried = [_trial(search, one, by_name) for one in scored]
        fastest = min((one for one in tried if one.accuracy >= TARGET), key=lambda one: one.latency_ms, default=None)
        missed_by_trial += fastest is not None and truths[fastest.name] < TARGET
        picked = selection.select(scored, TARGET, math.inf)
        met += picked is not None
        missed_by_bound += picked is not None and truths[picked.name] < TARGET
        any_bound_missed += any(one.assured_accuracy > truths[one.name] for one in scored)
    # The texts that choose promise too much; the bounds hold, all of a table together.
    assert missed_by_trial > 0.2 * DRAWS
    assert met > 0.1 * DRAWS
    assert missed_by_bound <= (1 - CONFIDENCE) * DRAWS
    assert any_bound_missed <= (1 - CONFIDENCE) * DRAWS


def _trial(search: CandidateSearch, one: Candidate, models: dict[str, ModelProfile]) -> Candidate:
    rule = one.gaps[0].rule if one.gaps else routing.RoutingRule(0.0)
    return search.try_out(Plan(tuple(models[name] for name in one.levels), rule, 0.0))
