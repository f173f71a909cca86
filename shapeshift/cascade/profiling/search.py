"""The search for the candidates of a task: chains of models, and c, alpha and w between them (Tabi, section 5).

Every model runs once over the sample. With these outputs, a trial of a cut-off c runs nothing; a trial of a pruning
scale alpha runs only the larger models on the pruned texts. Trials see the choosing texts alone; what they keep is
measured on the scoring texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from shapeshift.cascade.candidates import Candidate, Gap
from shapeshift.cascade.policy import calibration, routing
from shapeshift.cascade.policy.routing import Array, RoutingRule, softmax
from shapeshift.cascade.policy.selection import is_practical
from shapeshift.cascade.profiling.accuracy_bound import accuracy_bound
from shapeshift.cascade.profiling.model_profile import ModelProfile, Task, Texts
from shapeshift.cascade.profiling.observation import Observation
from shapeshift.cascade.profiling.outcomes import CONTROL_MS, Exit, chances_of_right, expected_outcome
from shapeshift.cascade.profiling.pruned_runs import PrunedRuns

FIRST_C, STEP_C = 0.95, 0.05
MAX_LEVELS = 3
# With fewer unsure texts the ensemble's temperature is fitted on all choosing texts.
_MIN_UNSURE = 30


@dataclass(frozen=True)
class Plan:
    """What the choosing texts choose: a chain, and the rule and alpha of its gaps; a single model uses neither."""

    chain: tuple[ModelProfile, ...]
    rule: RoutingRule
    alpha: float

    @property
    def name(self) -> str:
        models = " > ".join(model.name for model in self.chain)
        if len(self.chain) == 1:
            return models
        algorithm = "" if self.rule.algorithm == "sigmoid" else f" {self.rule.algorithm}"
        return f"{models} c={self.rule.c:g} alpha={self.alpha:g}{algorithm}"


@dataclass
class CandidateSearch:
    """The search. run(model, texts, what) runs a model on other texts; what: the purpose, for progress messages.

    k, algorithms: of Eq. 4.
    """

    task: Task
    models: Sequence[ModelProfile]
    run: Callable[[str, Texts, str], Observation]
    k: float = 10.0
    algorithms: Sequence[str] = ("sigmoid",)
    _cache: dict[tuple[str, int], Array] = field(default_factory=dict)
    _pruned: PrunedRuns = field(init=False)

    def __post_init__(self) -> None:
        self._pruned = PrunedRuns(self.task, self.run)

    def candidates(self, max_levels: int = MAX_LEVELS) -> list[Candidate]:
        """Every model alone, and every chain of up to `max_levels` models of ascending accuracy and time."""
        plans = [Plan((model,), RoutingRule(0.0), 0.0) for model in self.models]
        ordered = sorted(self.models, key=lambda model: (model.accuracy, model.mean_ms))
        for levels in range(2, max_levels + 1):
            for chain in combinations(ordered, levels):
                times = [model.mean_ms for model in chain]
                if times == sorted(times) and self._have_confidence(chain[:-1]):
                    plans += [plan for name in self.algorithms for plan in self._chain_plans(chain, name)]
        return [self.score(plan, len(plans)) for plan in plans]

    def try_out(self, plan: Plan) -> Candidate:
        """The candidate as the choosing texts see it: without bound, its ensembles not calibrated."""
        return self._evaluate(plan, self.task.choosing)

    def score(self, plan: Plan, compared: int) -> Candidate:
        """The candidate with all settings, measured on the scoring texts. compared: see `accuracy_bound`."""
        return self._evaluate(plan, self.task.scoring, compared)

    def _have_confidence(self, models: Sequence[ModelProfile]) -> bool:
        """The confidence of a regression needs an embedding."""
        return not self.task.is_regression or all(model.observed.embedding is not None for model in models)

    def _chain_plans(self, chain: tuple[ModelProfile, ...], algorithm: str) -> list[Plan]:
        tried: dict[str, Plan] = {}
        accurate = []
        min_accuracy = float(np.mean([model.accuracy for model in chain]))
        for alpha in self._pruned.alphas(chain):
            for c in _cut_offs():
                plan = Plan(chain, RoutingRule(c, self.k, algorithm), alpha)
                candidate = self.try_out(plan)
                if candidate.accuracy < min_accuracy:
                    break
                tried[plan.name] = plan
                accurate.append(candidate)
        return [tried[one.name] for one in pareto_optimal([one for one in accurate if is_practical(one)])]

    def _evaluate(self, plan: Plan, rows: Array, compared: int = 0) -> Candidate:
        """The candidate as `rows` measure it; compared: 0 for a trial, which fits no temperatures and has no bound."""
        (first, *larger_models), rule, task = plan.chain, plan.rule, self.task
        reaching = np.ones(len(task.texts))
        elapsed_ms = first.observed.engine_ms.copy()
        ensemble, right = self._ensemble_input(first.observed), task.right(first.observed.logits)
        exits: list[Exit] = []
        gaps: list[Gap] = []
        pruned = 0.0
        level, observed = first, first.observed
        for larger in larger_models:
            larger_observed, pruned = self._pruned.observe(first, larger, plan.alpha)
            weights = self._fit_agreement(observed, larger_observed)
            confidence = self._confidence(replace(level, observed=observed), weights)
            onward = self._p_large(observed, confidence, rule)
            exits.append(Exit(reaching * (1 - onward), right, elapsed_ms.copy()))
            reaching = reaching * onward
            larger_right = self._cached("right", larger_observed, lambda seen: task.right(seen.logits))
            w = self._ensemble_weight(right, larger_right, reaching)
            ensemble = routing.combine(ensemble, self._ensemble_input(larger_observed), w)
            right = task.right(ensemble)
            # Calibrating an ensemble takes longer than a trial.
            temperature = self._fit_temperature(ensemble, confidence <= rule.c) if compared else 1.0
            own_alpha = plan.alpha if not gaps else 0.0
            gaps.append(Gap(rule.c, rule.k, rule.algorithm, own_alpha, round(w, 6), temperature, weights))
            elapsed_ms = elapsed_ms + CONTROL_MS + larger_observed.engine_ms
            level, observed = larger, larger_observed
        exits.append(Exit(reaching, right, elapsed_ms))
        measured = [one.of(rows) for one in exits]
        outcome = expected_outcome(measured)
        return Candidate(
            name=plan.name,
            levels=tuple(model.name for model in plan.chain),
            gaps=tuple(gaps),
            accuracy=outcome.accuracy,
            latency_ms=outcome.mean_ms,
            p75_ms=outcome.p75_ms,
            p99_ms=outcome.p99_ms,
            model_latencies=tuple(round(model.mean_ms, 4) for model in plan.chain),
            shares=outcome.shares,
            mean_confidence=float(self._confidence(first, gaps[0].agreement if gaps else None)[rows].mean()),
            pruned=pruned,
            accuracy_bound=accuracy_bound(chances_of_right(measured), compared) if compared else None,
        )

    def _ensemble_input(self, observed: Observation) -> Array:
        if self.task.is_regression:
            return observed.logits
        return self._cached("softmax", observed, lambda seen: softmax(seen.logits))

    def _cached(self, what: str, observed: Observation, compute: Callable[[Observation], Array]) -> Array:
        key = (what, id(observed))
        if key not in self._cache:
            self._cache[key] = compute(observed)
        return self._cache[key]

    def _confidence(self, model: ModelProfile, weights: tuple[float, ...] | None) -> Array:
        """The confidence in each text [n]; 1 for a regression without weights."""
        if not self.task.is_regression:
            calibrated = routing.confidence
            return self._cached("confidence", model.observed, lambda seen: calibrated(seen.logits, model.temperature))
        if not weights or model.observed.embedding is None:
            return np.ones(len(self.task.texts))
        return np.array([routing.agreement(one, weights) for one in model.observed.embedding])

    def _p_large(self, observed: Observation, confidence: Array, rule: RoutingRule) -> Array:
        """The probability that each text goes on [n]."""

        def compute(_: Observation) -> Array:
            return np.array([routing.p_large(float(one), rule) for one in confidence])

        # The confidence of a regression also depends on the next model.
        return compute(observed) if self.task.is_regression else self._cached(f"p_large {rule}", observed, compute)

    def _fit_agreement(self, observed: Observation, larger: Observation) -> tuple[float, ...]:
        if not self.task.is_regression or observed.embedding is None:
            return ()
        agrees = np.abs(observed.logits[:, 0] - larger.logits[:, 0]) <= self.task.tolerance
        rows = self.task.choosing
        return tuple(calibration.fit_agreement(observed.embedding[rows], agrees[rows].astype(float)))

    def _ensemble_weight(self, small_right: Array, large_right: Array, reaching: Array) -> float:
        small_right, large_right, reaching = (one[self.task.choosing] for one in (small_right, large_right, reaching))
        total = reaching.sum()
        if not total:
            return routing.ensemble_weight(small_right, large_right)
        accuracies = [float((right * reaching).sum() / total) for right in (small_right, large_right)]
        return routing.ensemble_weight(accuracies[:1], accuracies[1:])

    def _fit_temperature(self, ensemble: Array, unsure: Array) -> float:
        if self.task.is_regression:
            return 1.0
        unsure = unsure & self.task.choosing
        rows = unsure if int(unsure.sum()) >= _MIN_UNSURE else self.task.choosing
        return calibration.fit_temperature(np.log(np.maximum(ensemble[rows], 1e-30)), self.task.truth[rows])


def pareto_optimal(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one dominates in accuracy and time, fastest first; of equal ones the first."""
    optimal: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.latency_ms, -one.accuracy)):
        if not optimal or one.accuracy > optimal[-1].accuracy:
            optimal.append(one)
    return optimal


def _cut_offs() -> Iterator[float]:
    steps = round(FIRST_C / STEP_C)
    return (round(FIRST_C - STEP_C * step, 2) for step in range(steps))
