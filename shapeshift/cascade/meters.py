"""What a cascade counts, and how far traffic has drifted from the profile of its candidate."""

from __future__ import annotations

import threading

from shapeshift.cascade.query import QueryRow
from shapeshift.cascade.table import Candidate
from shapeshift.serving.metrics import Counter, Gauge, Histogram

# Texts that the recent means look back at.
_WINDOW = 512
_CONTROL_MS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_MOST_LEVELS = 4


class RecentMean:
    """The mean of about the last `_WINDOW` values; of all until there were so many."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """One value more."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, _WINDOW)


class CascadeMeters:
    """Counted from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._candidate: Candidate | None = None
        self._levels = [0] * (_MOST_LEVELS + 1)
        self._pruned, self._fallbacks, self._swaps, self._refused = 0, 0, 0, 0
        self._early, self._confidence = RecentMean(), RecentMean()
        self.control_ms = Histogram("control_ms", "Control time of a text: dispatch, pruning, ensemble", _CONTROL_MS)

    def serve(self, candidate: Candidate) -> None:
        """Compare with this candidate's profile from now on."""
        with self._lock:
            self._swaps += self._candidate is not None
            self._candidate = candidate
            self._early, self._confidence = RecentMean(), RecentMean()

    def refuse(self) -> None:
        """A change of the registry could not be taken over."""
        with self._lock:
            self._refused += 1

    def saw(self, confidence: float) -> None:
        """The first level's confidence in one text."""
        with self._lock:
            self._confidence.add(confidence)

    def fell_back(self, rows: int) -> None:
        """So many texts got an earlier level's answer because a later one could not be asked."""
        with self._lock:
            self._fallbacks += rows

    def answered(self, row: QueryRow, by_choice: bool) -> None:
        """One text is answered; by_choice: by the level that its caller asked for."""
        with self._lock:
            self._levels[min(row.final.level, _MOST_LEVELS)] += 1
            self._pruned += row.pruned
            self.control_ms.observe(row.control_ms)
            if not by_choice:
                self._early.add(row.final.level == 1)

    @property
    def early_drift(self) -> float:
        """Recent share of texts that the first level answers, less that of the profile; 0 before any came."""
        known = self._candidate
        return self._early.value - known.shares[0] if known and self._early.count else 0.0

    @property
    def confidence_drift(self) -> float:
        """Recent mean confidence of the first level, less that of the profile; 0 before any text came."""
        known = self._candidate
        return self._confidence.value - known.mean_confidence if known and self._confidence.count else 0.0

    def exported(self) -> list[Counter | Gauge | Histogram]:
        """The metrics."""

        def of_level(number: int) -> Counter:
            labels = {"level": str(number)}
            return Counter("level_texts_total", "Texts answered by each level", labels, lambda: self._levels[number])

        return [
            *(of_level(number) for number in range(1, _MOST_LEVELS + 1)),
            self.control_ms,
            Counter("words_pruned_total", "Words that later levels were spared", read=lambda: self._pruned),
            Counter("fallbacks_total", "Texts answered by an earlier level in need", read=lambda: self._fallbacks),
            Counter("candidate_swaps_total", "Changes of the candidate", read=lambda: self._swaps),
            Counter("candidate_errors_total", "Changes that could not be taken over", read=lambda: self._refused),
            Gauge("early_share_recent", "Recent share of texts answered by level 1", lambda: self._early.value),
            Gauge("early_share_drift", "That less the profile's", lambda: self.early_drift),
            Gauge("confidence_recent", "Recent mean confidence of level 1", lambda: self._confidence.value),
            Gauge("confidence_drift", "That less the profile's", lambda: self.confidence_drift),
        ]
