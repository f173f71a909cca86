"""Outputs of larger models on pruned texts: the only runs of models during a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shapeshift.cascade.policy import pruning
from shapeshift.cascade.profiling.model_profile import ModelProfile, Task, Texts
from shapeshift.cascade.profiling.observation import Observation

FIRST_ALPHA, STEP_ALPHA, MAX_ALPHA = 0.5, 0.1, 1.5
MAX_LOSS = 0.02


@dataclass
class PrunedRuns:
    """Keeps every run. run(model, texts, what) runs a model on other texts; what: the purpose, for progress texts."""

    task: Task
    run: Callable[[str, Texts, str], Observation]
    _runs: dict[tuple[str, str, float], tuple[Observation, float]] = field(default_factory=dict)
    _pruned: dict[tuple[str, float], tuple[Texts, float]] = field(default_factory=dict)

    def alphas(self, chain: Sequence[ModelProfile]) -> Iterator[float]:
        """0, then increasing alphas, until a larger model loses more than MAX_LOSS of accuracy on the pruned texts."""
        yield 0.0
        if not chain[0].observed.importance:
            return
        alpha = FIRST_ALPHA
        while alpha <= MAX_ALPHA:
            if any(self._loss(chain[0], model, alpha) > MAX_LOSS for model in chain[1:]):
                return
            yield alpha
            alpha = round(alpha + STEP_ALPHA, 2)

    def observe(self, small: ModelProfile, large: ModelProfile, alpha: float) -> tuple[Observation, float]:
        """The large model on the texts that the small one has pruned, and the share of words that were removed.

        Where no word was removed, nothing runs.
        """
        if not alpha:
            return large.observed, 0.0
        key = (small.name, large.name, alpha)
        if key not in self._runs:
            pruned, share = self._prune(small, alpha)
            what = f"{large.name}, words pruned by {small.name}, alpha {alpha:g}"
            self._runs[key] = self.run(large.name, pruned, what) if share else large.observed, share
        return self._runs[key]

    def _loss(self, small: ModelProfile, large: ModelProfile, alpha: float) -> float:
        right = self.task.right(self.observe(small, large, alpha)[0].logits)
        return large.accuracy - float(right[self.task.choosing].mean())

    def _prune(self, small: ModelProfile, alpha: float) -> tuple[Texts, float]:
        """The texts as pruned by the small model, and the share of words that were removed."""
        key = small.name, alpha
        if key not in self._pruned:
            rows = zip(self.task.texts, small.observed.offsets, small.observed.importance, strict=True)
            pruned = [pruning.prune_texts(texts, offsets, importance, alpha) for texts, offsets, importance in rows]
            words = sum(len(pruning.word_spans(text)) for texts in self.task.texts for text in texts)
            self._pruned[key] = [one.texts for one in pruned], sum(one.words_removed for one in pruned) / max(words, 1)
        return self._pruned[key]
