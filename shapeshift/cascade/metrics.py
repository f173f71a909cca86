"""Metrics of a cascade, and how far traffic has drifted from the profile of its candidate."""

from __future__ import annotations

import threading

from shapeshift.cascade.candidates.table import Candidate
from shapeshift.cascade.request import Row
from shapeshift.serving.metrics import Counter, Gauge, Histogram

# The recent means cover about so many texts.
_WINDOW = 512
_CONTROL_MS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_MAX_LEVELS = 4


class RecentMean:
    """The mean of about the last `_WINDOW` values; of all values while there are fewer."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, _WINDOW)


class CascadeMetrics:
    """Any thread may call the methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._candidate: Candidate | None = None
        self._levels = [0] * (_MAX_LEVELS + 1)
        self._words_pruned, self._fallbacks, self._swaps, self._failed_swaps = 0, 0, 0, 0
        self._early_share, self._confidence = RecentMean(), RecentMean()
        self.control_ms = Histogram("control_ms", "Control time of a text: dispatch, pruning, ensemble", _CONTROL_MS)

    def set_candidate(self, candidate: Candidate) -> None:
        """Compare with this candidate's profile from now on; counts a swap unless it is the first."""
        with self._lock:
            self._swaps += self._candidate is not None
            self._candidate = candidate
            self._early_share, self._confidence = RecentMean(), RecentMean()

    def count_failed_swap(self) -> None:
        """Count a change of the registry that could not be applied."""
        with self._lock:
            self._failed_swaps += 1

    def observe_confidence(self, confidence: float) -> None:
        """Record the first level's confidence in one text."""
        with self._lock:
            self._confidence.add(confidence)

    def count_fallbacks(self, rows: int) -> None:
        """Count rows that keep an earlier level's answer because a later level failed."""
        with self._lock:
            self._fallbacks += rows

    def count_row(self, row: Row, level_requested: bool) -> None:
        """Count an answered row; level_requested: whether the client asked for this level."""
        with self._lock:
            self._levels[min(row.final.level, _MAX_LEVELS)] += 1
            self._words_pruned += row.words_pruned
            self.control_ms.observe(row.control_ms)
            if not level_requested:
                self._early_share.add(row.final.level == 1)

    @property
    def early_drift(self) -> float:
        """Recent share of texts that the first level answers, minus the profile's; 0 before the first text."""
        profile = self._candidate
        return self._early_share.value - profile.shares[0] if profile and self._early_share.count else 0.0

    @property
    def confidence_drift(self) -> float:
        """Recent mean confidence of the first level, minus the profile's; 0 before the first text."""
        profile = self._candidate
        return self._confidence.value - profile.mean_confidence if profile and self._confidence.count else 0.0

    def exported(self) -> list[Counter | Gauge | Histogram]:
        """All metrics, for the flusher."""

        def of_level(number: int) -> Counter:
            labels = {"level": str(number)}
            return Counter("level_texts_total", "Texts answered by each level", labels, lambda: self._levels[number])

        return [
            *(of_level(number) for number in range(1, _MAX_LEVELS + 1)),
            self.control_ms,
            Counter("words_pruned_total", "Words that later levels did not read", read=lambda: self._words_pruned),
            Counter("fallbacks_total", "Texts that kept an earlier level's answer", read=lambda: self._fallbacks),
            Counter("candidate_swaps_total", "Changes of the candidate", read=lambda: self._swaps),
            Counter("candidate_errors_total", "Changes that could not be applied", read=lambda: self._failed_swaps),
            Gauge("early_share_recent", "Recent share of texts answered by level 1", lambda: self._early_share.value),
            Gauge("early_share_drift", "The same minus the profile's", lambda: self.early_drift),
            Gauge("confidence_recent", "Recent mean confidence of level 1", lambda: self._confidence.value),
            Gauge("confidence_drift", "The same minus the profile's", lambda: self.confidence_drift),
        ]
