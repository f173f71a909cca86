"""One scrape of a metrics page, by model, without what ended processes have left there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from shapeshift.sidecar.observe import quantile
from shapeshift.triton.metrics import HEARTBEAT, Heartbeats, Labels, Samples

PREFIX = "shapeshift_"
_KEPT_LABELS = 1 << 17


class Owner(NamedTuple):
    """Whose series it is: a model's process, and the series' further labels."""

    model: str
    pid: str
    labels: tuple[tuple[str, str], ...]


class Page:
    """The series of this project. at: monotonic seconds. Names are without prefix."""

    def __init__(self, samples: Samples, at: float, living: frozenset[tuple[str, str]] | None = None) -> None:
        """living: the processes (model, pid) whose series count; None: all."""
        self.at = at
        # All series, and those of them that count.
        self._all: dict[tuple[str, str], dict[Owner, float]] = defaultdict(dict)
        for (name, labels), value in samples.items():
            owner = _owner(labels) if name.startswith(PREFIX) and math.isfinite(value) else None
            if owner is not None:
                self._all[owner.model, name.removeprefix(PREFIX)][owner] = value
        self._series: Mapping[tuple[str, str], Mapping[Owner, float]] = self._all
        if living is not None:
            counting = {
                key: {owner: value for owner, value in series.items() if owner[:2] in living}
                for key, series in self._all.items()
            }
            self._series = {key: series for key, series in counting.items() if series}

    def models_with(self, name: str) -> list[str]:
        """The models that export this metric, in order."""
        return sorted(model for model, metric in self._series if metric == name)

    def series(self, model: str, name: str) -> Mapping[Owner, float]:
        """The series of one metric."""
        return self._series.get((model, name), {})

    def before(self, model: str, name: str) -> Mapping[Owner, float]:
        """What its series start from at later pages: also those of processes that seemed to have ended."""
        return self._all.get((model, name), {})

    def by(self, model: str, name: str, label: str) -> dict[str, float]:
        """The metric by the value of one label, summed over processes and all else."""
        sums: dict[str, float] = defaultdict(float)
        for owner, value in self.series(model, name).items():
            sums[dict(owner.labels).get(label, "")] += value
        return dict(sums)

    def total(self, model: str, name: str) -> float:
        """The metric's sum."""
        return sum(self.series(model, name).values())


class Change:
    """What happened between two scrapes; `old` may be the same as `new`."""

    def __init__(self, old: Page, new: Page) -> None:
        self.old, self.new = old, new
        self.seconds = max(new.at - old.at, 1e-9)

    def by(self, model: str, name: str, label: str) -> dict[str, float]:
        """The growth of a counter by the value of one label. A counter that fell has grown from 0."""
        before, sums = self.old.before(model, name), dict[str, float]()
        for owner, value in self.new.series(model, name).items():
            key, start = dict(owner.labels).get(label, ""), before.get(owner, 0.0)
            sums[key] = sums.get(key, 0.0) + (value - start if value >= start else value)
        return sums

    def total(self, model: str, name: str) -> float:
        """The growth of a counter, summed."""
        return sum(self.by(model, name, "").values())

    def rate(self, model: str, name: str) -> float:
        """The growth of a counter a second."""
        return self.total(model, name) / self.seconds if self.old.at < self.new.at else 0.0

    def histogram(self, model: str, name: str) -> dict[float, float]:
        """Observations by the upper bound of their bucket. name: without `_bucket`."""
        counts, below = dict[float, float](), 0.0
        for bound, total in sorted((_bound(le), value) for le, value in self.by(model, f"{name}_bucket", "le").items()):
            counts[bound] = max(total - below, 0.0)
            below = max(below, total)
        return counts

    def quantile(self, model: str, name: str, share: float) -> float | None:
        """The value below which this share of a histogram's observations are; None without any."""
        return quantile(self.histogram(model, name), share)


class LivePages:
    """Makes a `Page` of each scrape, without processes whose heartbeat stands still."""

    def __init__(self) -> None:
        self._heartbeats = Heartbeats[tuple[str, str]]()
        # When each model was last seen alive.
        self._lived: dict[str, float] = {}

    def page(self, samples: Samples, at: float) -> Page:
        """The page of a scrape at that time."""
        owners = {labels: _owner(labels) for name, labels in samples if name == HEARTBEAT}
        beats = {(owner.model, owner.pid): samples[HEARTBEAT, labels] for labels, owner in owners.items() if owner}
        living = self._heartbeats.living(beats)
        self._lived |= {model: at for model, _ in living}
        return Page(samples, at, living)

    def silent(self, at: float, since: float) -> list[str]:
        """The models that lived after `since` and have no living process at the last scrape, which was at `at`."""
        return sorted(model for model, lived in self._lived.items() if since <= lived < at)


# Each page has the labels of the page before.
@lru_cache(maxsize=_KEPT_LABELS)
def _owner(labels: Labels) -> Owner | None:
    values = dict(labels)
    model, pid = values.pop("model", None), values.pop("pid", None)
    return None if not model or pid is None else Owner(model, pid, tuple(sorted(values.items())))


def _bound(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.inf
