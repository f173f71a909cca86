"""Finding the candidates of a task: which models follow one another, and with which c, alpha and w (Tabi, section 5).

Every model runs once over the sample. What it made of it is kept, so that trying a cut-off runs nothing, and trying a
pruning scale runs only the large model, on the texts that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from shapeshift.cascade import agreement, calibrate, ensemble, route
from shapeshift.cascade.observe import Observed
from shapeshift.cascade.outcomes import CONTROL_MS, Stop, expected
from shapeshift.cascade.profiled import Profiled, Task, Texts
from shapeshift.cascade.pruned_runs import PrunedRuns
from shapeshift.cascade.softmax import Array, softmax
from shapeshift.cascade.table import Candidate, Gap

FIRST_C, STEP_C = 0.95, 0.05
MOST_LEVELS = 3
# Fewer unsure texts than this say too little of the ensemble's temperature.
_ENOUGH = 30


@dataclass
class Search:
    """The search. run(model, texts, what) runs a model over other texts, for the purpose `what`; fit: a mask [n] of the
    texts that a regression's agreement is fitted to."""

    task: Task
    models: Sequence[Profiled]
    fit: Array
    run: Callable[[str, Texts, str], Observed]
    k: float = 10.0
    algorithms: Sequence[str] = ("sigmoid",)
    _known: dict[tuple[str, int], Array] = field(default_factory=dict)
    _pruned: PrunedRuns = field(init=False)

    def __post_init__(self) -> None:
        self._pruned = PrunedRuns(self.task, self.run)

    def candidates(self, most_levels: int = MOST_LEVELS) -> list[Candidate]:
        """Every model alone, and every cascade of up to `most_levels` models of ascending accuracy and time."""
        found = [self._alone(model) for model in self.models]
        ordered = sorted(self.models, key=lambda model: (model.accuracy, model.mean_ms))
        for levels in range(2, most_levels + 1):
            for chain in combinations(ordered, levels):
                times = [model.mean_ms for model in chain]
                if times == sorted(times) and self._can_decide(chain[:-1]):
                    found += self._of_chain(chain)
        return found

    def _can_decide(self, models: Sequence[Profiled]) -> bool:
        """A regression is sure by its embedding."""
        return not self.task.is_regression or all(model.seen.embedding is not None for model in models)

    def _alone(self, model: Profiled) -> Candidate:
        answers = expected(
            [Stop(np.ones(len(self.task.texts)), self.task.right(model.seen.logits), model.seen.engine_ms)]
        )
        return Candidate(
            model.name,
            (model.name,),
            (),
            answers.accuracy,
            answers.mean_ms,
            answers.p75_ms,
            answers.p99_ms,
            (round(model.mean_ms, 4),),
            (1.0,),
            float(self._sure(model, None).mean()),
            0.0,
        )

    def _of_chain(self, chain: Sequence[Profiled]) -> list[Candidate]:
        kept = [one for algorithm in self.algorithms for one in self._of_rules(chain, algorithm)]
        # To calibrate an ensemble takes longer than to work out what it does.
        return [self._candidate(chain, one.gaps[0].rule, one.gaps[0].alpha, calibrated=True) for one in kept]

    def _of_rules(self, chain: Sequence[Profiled], algorithm: str) -> list[Candidate]:
        found = []
        least = float(np.mean([model.accuracy for model in chain]))
        for alpha in self._pruned.alphas(chain):
            for c in _cuts():
                made = self._candidate(chain, route.Rule(c, self.k, algorithm), alpha)
                if made.accuracy < least:
                    break
                found.append(made)
        return undominated([one for one in found if one.measured.practical])

    def _candidate(
        self, chain: Sequence[Profiled], rule: route.Rule, alpha: float, calibrated: bool = False
    ) -> Candidate:
        small, task = chain[0], self.task
        reaching = np.ones(len(task.texts))
        spent = small.seen.engine_ms.copy()
        before = self._joinable(small.seen)
        right = task.right(small.seen.logits)
        stops, gaps, pruned = [], [], 0.0
        own, seen = small, small.seen
        for large in chain[1:]:
            after, pruned = self._pruned.after(small, large, alpha)
            weights = self._agreement(own, seen, after)
            sure = self._sure(replace(own, seen=seen), weights)
            onward = self._onward(seen, sure, rule)
            stops.append(Stop(reaching * (1 - onward), right, spent.copy()))
            reaching = reaching * onward
            share = self._weight(right, self._once("right", after, lambda seen: task.right(seen.logits)), reaching)
            joined = ensemble.combine(before, self._joinable(after), share)
            gap = Gap(rule.c, rule.k, rule.algorithm, alpha if large is chain[1] else 0.0, round(share, 6))
            calibrates = self._temperature(joined, sure <= rule.c) if calibrated else 1.0
            gaps.append(replace(gap, temperature=calibrates, agreement=weights))
            spent = spent + CONTROL_MS + after.engine_ms
            before, right = joined, task.right(joined)
            own, seen = large, after
        stops.append(Stop(reaching, right, spent))
        answers = expected(stops)
        first = self._sure(small, gaps[0].agreement)
        name = " > ".join(model.name for model in chain) + f" c={rule.c:g} alpha={alpha:g}"
        if rule.algorithm != "sigmoid":
            name += f" {rule.algorithm}"
        return Candidate(
            name,
            tuple(model.name for model in chain),
            tuple(gaps),
            answers.accuracy,
            answers.mean_ms,
            answers.p75_ms,
            answers.p99_ms,
            tuple(round(model.mean_ms, 4) for model in chain),
            answers.shares,
            float(first.mean()),
            pruned,
        )

    def _joinable(self, seen: Observed) -> Array:
        if self.task.is_regression:
            return seen.logits
        return self._once("softmax", seen, lambda own: softmax(own.logits))

    def _once(self, what: str, seen: Observed, make: Callable[[Observed], Array]) -> Array:
        """make(seen), worked out only once."""
        key = (what, id(seen))
        if key not in self._known:
            self._known[key] = make(seen)
        return self._known[key]

    def _sure(self, model: Profiled, weights: tuple[float, ...] | None) -> Array:
        """The confidence in each text [n]; of a regression without weights 1, as nothing is known of it."""
        if not self.task.is_regression:
            return self._once("sure", model.seen, lambda seen: calibrate.confidences(seen.logits, model.temperature))
        if not weights or model.seen.embedding is None:
            return np.ones(len(self.task.texts))
        return np.array([agreement.confidence(one, weights) for one in model.seen.embedding])

    def _onward(self, seen: Observed, sure: Array, rule: route.Rule) -> Array:
        """How likely each text goes on [n]."""

        def work_out(_: Observed) -> Array:
            return np.array([route.p_large(float(one), rule) for one in sure])

        # What a regression is sure by depends on the next model, too.
        return work_out(seen) if self.task.is_regression else self._once(f"onward {rule}", seen, work_out)

    def _agreement(self, model: Profiled, seen: Observed, after: Observed) -> tuple[float, ...]:
        if not self.task.is_regression or seen.embedding is None:
            return ()
        near = np.abs(seen.logits[:, 0] - after.logits[:, 0]) <= self.task.tolerance
        return tuple(agreement.fit(seen.embedding[self.fit], near[self.fit].astype(float)))

    def _weight(self, small_right: Array, large_right: Array, reaching: Array) -> float:
        total = reaching.sum()
        if not total:
            return ensemble.weight(small_right, large_right)
        shares = [float((right * reaching).sum() / total) for right in (small_right, large_right)]
        return ensemble.weight(shares[:1], shares[1:])

    def _temperature(self, joined: Array, unsure: Array) -> float:
        if self.task.is_regression:
            return 1.0
        rows = unsure if int(unsure.sum()) >= _ENOUGH else np.ones(len(unsure), bool)
        return calibrate.temperature(np.log(np.maximum(joined[rows], 1e-30)), self.task.truth[rows])


def undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other is both at least as accurate and at least as fast as; of equal ones the first."""
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.latency_ms, -one.accuracy)):
        if not kept or one.accuracy > kept[-1].accuracy:
            kept.append(one)
    return kept


def _cuts() -> Iterator[float]:
    steps = round(FIRST_C / STEP_C)
    return (round(FIRST_C - STEP_C * step, 2) for step in range(steps))
