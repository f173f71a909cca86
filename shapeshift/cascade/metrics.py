"""Metrics of a cascade, and how far traffic has drifted from the profile of its candidate."""

from __future__ import annotations

from collections.abc import Sequence

from shapeshift.cascade.candidates import Candidate
from shapeshift.cascade.request import Row
from shapeshift.serving.metrics import Counter, Gauge, Histogram, Metric

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
        self.count += 1
        self.value += (value - self.value) / min(self.count, _WINDOW)

    def drift(self, profiled: float) -> float:
        """The mean less what was profiled; 0 before the first value."""
        return self.value - profiled if self.count else 0.0


class Traffic:
    """Recent texts of one candidate that the client did not send to a level of its choice."""

    def __init__(self, candidate: Candidate) -> None:
        self.early_share, self.confidence = RecentMean(), RecentMean()
        self._candidate = candidate

    @property
    def early_drift(self) -> float:
        return self.early_share.drift(self._candidate.shares[0])

    @property
    def confidence_drift(self) -> float:
        return self.confidence.drift(self._candidate.mean_confidence)


class CascadeMetrics:
    """Rows are counted on one thread, and swaps of the candidate on one."""

    def __init__(self, candidate: Candidate) -> None:
        self._traffic = Traffic(candidate)
        self._levels = [
            Counter("level_texts_total", "Texts answered by each level", {"level": str(number)})
            for number in range(1, _MAX_LEVELS + 1)
        ]
        self._control_ms = Histogram("control_ms", "Control time of a text: dispatch, pruning, ensemble", _CONTROL_MS)
        self._words_pruned = Counter("words_pruned_total", "Words that later levels did not read")
        self._fallbacks = Counter("fallbacks_total", "Texts that kept an earlier level's answer")
        self._swaps = Counter("candidate_swaps_total", "Changes of the candidate")
        self.failed_swaps = Counter("candidate_errors_total", "Changes that could not be applied")

    def swap(self, candidate: Candidate) -> None:
        """Compare with this candidate's profile from now on."""
        self._swaps.add()
        self._traffic = Traffic(candidate)

    def count_row(self, row: Row, level_requested: bool) -> None:
        """Count an answered row; level_requested: whether the client asked for this level."""
        self._levels[min(row.final.level, _MAX_LEVELS) - 1].add()
        self._words_pruned.add(row.words_pruned)
        self._fallbacks.add(row.fell_back)
        self._control_ms.observe(row.control_ms)
        if not level_requested and row.confidence is not None:
            self._traffic.early_share.add(row.final.level == 1)
            self._traffic.confidence.add(row.confidence)

    def exported(self) -> Sequence[Metric]:
        """All metrics, for the flusher."""
        return [
            *self._levels,
            *(self._control_ms, self._words_pruned, self._fallbacks, self._swaps, self.failed_swaps),
            Gauge(
                "early_share_recent",
                "Recent share of texts answered by level 1",
                lambda: self._traffic.early_share.value,
            ),
            Gauge("early_share_drift", "The same minus the profile's", lambda: self._traffic.early_drift),
            Gauge("confidence_recent", "Recent mean confidence of level 1", lambda: self._traffic.confidence.value),
            Gauge("confidence_drift", "The same minus the profile's", lambda: self._traffic.confidence_drift),
        ]
