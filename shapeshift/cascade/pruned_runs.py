"""What larger models make of the texts that a smaller one leaves: all for which a search runs models again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shapeshift.cascade import words
from shapeshift.cascade.observe import Observed
from shapeshift.cascade.profiled import Profiled, Task, Texts

FIRST_ALPHA, STEP_ALPHA, MOST_ALPHA = 0.5, 0.1, 1.5
MOST_LOSS = 0.02


@dataclass
class PrunedRuns:
    """run(model, texts, what) runs a model over other texts, for the purpose `what`; what it found is kept."""

    task: Task
    run: Callable[[str, Texts, str], Observed]
    _found: dict[tuple[str, str, float], tuple[Observed, float]] = field(default_factory=dict)
    _left: dict[tuple[str, float], tuple[Texts, float]] = field(default_factory=dict)

    def alphas(self, chain: Sequence[Profiled]) -> Iterator[float]:
        """0, and then scales until a large model's accuracy has fallen too far."""
        yield 0.0
        if not chain[0].seen.importance:
            return
        alpha = FIRST_ALPHA
        while alpha <= MOST_ALPHA:
            if any(self._loss(chain[0], model, alpha) > MOST_LOSS for model in chain[1:]):
                return
            yield alpha
            alpha = round(alpha + STEP_ALPHA, 2)

    def after(self, small: Profiled, large: Profiled, alpha: float) -> tuple[Observed, float]:
        """What the large model makes of the texts that the small one leaves, and the share of words that went.

        Where none went, nothing is run.
        """
        if not alpha:
            return large.seen, 0.0
        key = (small.name, large.name, alpha)
        if key not in self._found:
            left, share = self._left_by(small, alpha)
            what = f"{large.name}, words pruned by {small.name}, alpha {alpha:g}"
            self._found[key] = self.run(large.name, left, what) if share else large.seen, share
        return self._found[key]

    def _loss(self, small: Profiled, large: Profiled, alpha: float) -> float:
        return large.accuracy - float(self.task.right(self.after(small, large, alpha)[0].logits).mean())

    def _left_by(self, small: Profiled, alpha: float) -> tuple[Texts, float]:
        """What the small model leaves of the texts, and the share of words that went."""
        key = small.name, alpha
        if key not in self._left:
            rows = zip(self.task.texts, small.seen.offsets, small.seen.importance, strict=True)
            left = [words.left_of(text, offsets, importance, alpha) for text, offsets, importance in rows]
            in_all = sum(len(words.spans(one)) for text in self.task.texts for one in text)
            self._left[key] = [one.texts for one in left], sum(one.words for one in left) / max(in_all, 1)
        return self._left[key]
