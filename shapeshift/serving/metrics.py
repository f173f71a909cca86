"""Metrics: counted in the process, exported once a second through Triton's /metrics.

Every operation on a Triton metric blocks for tens of microseconds. Serving threads therefore only add to Python
numbers, and one thread flushes the differences. Histograms are exported as COUNTERs named `<name>_bucket` with a label
`le`, cumulative as in Prometheus, so that a scraper can subtract two scrapes.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Callable, Sequence

from shapeshift.serving.error_codes import CODES
from shapeshift.serving.pb_utils import MetricFamilies, MetricFamily, MetricSeries, PbUtils

PREFIX = "shapeshift_"
OTHER = "other"
LENGTH_STEP = 8
_LATENCY_MS = (1, 2, 5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000, 10000)
# Where autoscaling looks: well below the objective, and about to miss it (Arlo, section 4).
_SLO_SHARES = (0.5, 0.95)
# Between two flushes, to see whether one is urgent.
_LOOKS = 4


class Counter:
    """A number that only grows. One thread adds to it, or each flush reads it from `read`."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: dict[str, str] | None = None,
        read: Callable[[], float] | None = None,
    ) -> None:
        self.name = PREFIX + name
        self.help_text = help_text
        self.labels = labels or {}
        self._value = 0.0
        self._read = read

    @property
    def value(self) -> float:
        return self._read() if self._read else self._value

    def add(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self._value += amount


class Gauge:
    """A number that each flush reads from a function."""

    def __init__(
        self, name: str, help_text: str, read: Callable[[], float], labels: dict[str, str] | None = None
    ) -> None:
        self.name = PREFIX + name
        self.help_text = help_text
        self.labels = labels or {}
        self.read = read


class Histogram:
    """Counts by inclusive upper bound, with sum and count. One thread observes."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = PREFIX + name
        self.help_text = help_text
        self.bounds = list(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect.bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def totals(self) -> tuple[list[int], float]:
        """Cumulative counts by bound, the last for +Inf; and the sum."""
        running, cumulative = 0, []
        for count in list(self._counts):
            running += count
            cumulative.append(running)
        return cumulative, self._sum


class Counters:
    """Counters by the value of one label. The first `most` values have their own, the rest share `other`."""

    def __init__(self, name: str, help_text: str, label: str, most: int = 100) -> None:
        self._name, self._help_text, self._label, self._most = name, help_text, label, most
        self._counters: dict[str, Counter] = {}

    def add(self, value: str, amount: float = 1.0) -> None:
        """Add `amount` to the counter of one label value. One thread calls this."""
        if value not in self._counters and len(self._counters) >= self._most:
            value = OTHER
        if value not in self._counters:
            self._counters[value] = Counter(self._name, self._help_text, {self._label: value})
        self._counters[value].add(amount)

    def each(self) -> list[Counter]:
        """A counter for each label value seen so far."""
        return list(self._counters.values())


class Info:
    """A gauge whose labels, read at each flush, describe the current state. Its value is the time in seconds."""

    def __init__(self, name: str, help_text: str, read: Callable[[], dict[str, str]]) -> None:
        self.name = PREFIX + name
        self.help_text = help_text
        self.read = read


class Gauges:
    """Gauges by the value of one label; each flush reads them all from a function.

    urgent: asked some times between two flushes; True ends the wait for the next one.
    """

    def __init__(
        self,
        name: str,
        help_text: str,
        label: str,
        read: Callable[[], dict[str, float]],
        urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = PREFIX + name
        self.help_text = help_text
        self.label = label
        self.read = read
        self.urgent = urgent


Metric = Counter | Gauge | Histogram | Counters | Info | Gauges


CHECKS = {"right": "CHECK", "wrong": "CHECK_WRONG"}
"""The codes of the sidecar's own requests, by their parameter `check`."""


class RequestMetrics:
    """What every front counts: request lengths on arrival, codes of answers, and latencies.

    The sidecar's own requests have codes of their own, and neither length nor latency.

    what: the unit of the lengths, for the help text. max_tokens: 0: requests have no length, and none is exported.
    slo_ms: latency objective, 0 for none; shares of it are bounds.
    """

    def __init__(self, what: str, max_tokens: int, slo_ms: float) -> None:
        lengths = range(LENGTH_STEP, max_tokens + LENGTH_STEP, LENGTH_STEP)
        self.lengths = Histogram("request_tokens", f"Tokens of the {what} offered, on arrival", lengths)
        latencies = sorted({*_LATENCY_MS, *(share * slo_ms for share in _SLO_SHARES if slo_ms)})
        self.latency_ms = Histogram("request_latency_ms", "From arrival to the answer given to Triton", latencies)
        self.answered = {
            code: Counter("requests_total", "Requests answered, by Triton code", {"code": code})
            for code in (*CODES, *CHECKS.values())
        }

        self.exported: list[Metric] = [self.latency_ms, *self.answered.values()]
        if max_tokens:
            self.exported.insert(0, self.lengths)


class MetricsFlusher:
    """The thread that exports metrics, and the heartbeat. It does nothing on a server without custom metrics."""

    def __init__(
        self,
        pb_utils: PbUtils,
        model: str,
        metrics: Sequence[Metric],
        log: Callable[[str], None],
        period_s: float = 1.0,
    ) -> None:
        self._labels = {"model": model, "pid": str(os.getpid())}
        self._metrics = list(metrics)
        self._period_s = period_s
        self._log = log
        self._stop = threading.Event()
        self._exported: dict[tuple[str, str], tuple[MetricSeries, float]] = {}
        # Once a family object is collected, every metric of it raises: families live as long as the process.
        self._families: dict[str, MetricFamily] = {}
        self._kinds: MetricFamilies | None = getattr(pb_utils, "MetricFamily", None)
        self._heartbeat = Counter("heartbeat_total", "Seconds that this process has been alive and flushing")
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        if self._kinds is not None:
            self._thread.start()
        else:
            log("this server exports no metrics of backends")

    def flush(self) -> None:
        """Export the changes since the last flush."""
        self._export_counter(self._heartbeat.name, self._heartbeat.help_text, {}, self._heartbeat.value)
        for metric in self._metrics:
            if isinstance(metric, Counter | Counters):
                for counter in [metric] if isinstance(metric, Counter) else metric.each():
                    self._export_counter(counter.name, counter.help_text, counter.labels, counter.value)
            elif isinstance(metric, Info):
                self._export_info(metric)
            elif isinstance(metric, Gauge):
                self._metric(metric.name, metric.help_text, metric.labels, "GAUGE").set(float(metric.read()))
            elif isinstance(metric, Gauges):
                for value, number in metric.read().items():
                    self._metric(metric.name, metric.help_text, {metric.label: value}, "GAUGE").set(float(number))
            else:
                counts, total = metric.totals()
                for bound, count in zip([*metric.bounds, "+Inf"], counts, strict=True):
                    label = bound if isinstance(bound, str) else f"{bound:g}"
                    self._export_counter(f"{metric.name}_bucket", metric.help_text, {"le": label}, count)
                self._export_counter(f"{metric.name}_sum", metric.help_text, {}, total)
                self._export_counter(f"{metric.name}_count", metric.help_text, {}, counts[-1])

    def close(self, timeout_s: float = 3.0) -> None:
        """Flush once more and end the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        # A metric destroyed at interpreter exit uses a server that has gone, and crashes the process.
        self._exported.clear()
        self._families.clear()

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(self._period_s / _LOOKS):
            looks += 1
            due = looks % _LOOKS == 0
            if due:
                self._heartbeat.add()
            self._try_to(self.flush if due else self._flush_if_urgent)
        self._try_to(self.flush)

    def _flush_if_urgent(self) -> None:
        if any(metric.urgent() for metric in self._metrics if isinstance(metric, Gauges)):
            self.flush()

    def _try_to(self, export: Callable[[], None]) -> None:
        try:
            export()
        except Exception as error:  # noqa: BLE001  metrics must never stop a server
            self._log(f"metrics could not be exported: {error}")

    def _export_counter(self, name: str, help_text: str, labels: dict[str, str], value: float) -> None:
        metric = self._metric(name, help_text, labels, "COUNTER")
        key = (name, str(labels))
        delta = value - self._exported[key][1]
        if delta > 0:
            metric.increment(delta)
            self._exported[key] = (metric, value)

    def _export_info(self, info: Info) -> None:
        labels = info.read()
        for key in [key for key in self._exported if key[0] == info.name and key[1] != str(labels)]:
            # The family holds the series: the server drops the old labels only with the family.
            del self._exported[key], self._families[info.name]
        self._metric(info.name, info.help_text, labels, "GAUGE").set(time.time())

    def _metric(self, name: str, help_text: str, labels: dict[str, str], kind: str) -> MetricSeries:
        key = (name, str(labels))
        if key not in self._exported:
            if name not in self._families:
                kinds = self._kinds
                assert kinds is not None, "nothing is exported on a server without metrics of backends"
                self._families[name] = kinds(name=name, description=help_text, kind=getattr(kinds, kind))
            metric = self._families[name].Metric(labels={**self._labels, **labels})
            self._exported[key] = (metric, 0.0)
        return self._exported[key][0]
