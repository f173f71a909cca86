"""The results of a replay: one record a request, and a summary as text or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

OK = "OK"
LATE_S = 0.001
"""A request that is sent more than this after its intended instant counts as late."""


@dataclass(frozen=True)
class Summary:
    """The figures of one replay; `None` if no request succeeded or no SLO was given.

    Latencies are those of the `ok` requests, in milliseconds from the *intended* instant to the complete answer. `sent`
    excludes requests that the client's own limit stopped. `throughput_per_s` is `ok` over the time from the first
    intended instant to the last successful answer. `within_slo` is a share of *all* planned requests: a failed request
    misses its SLO.
    """

    planned: int
    sent: int
    ok: int
    failed: Mapping[str, int]
    offered_per_s: float
    throughput_per_s: float
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p98_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    within_slo: float | None
    late: int
    late_p99_ms: float
    late_max_ms: float
    client_cpu_us: float


@dataclass(frozen=True)
class Report:
    """One record a planned request, in order; instants are seconds from the start of the clock.

    `intended_s`, `sent_s`, `done_s`: float64[n]; `sent_s` is NaN for a request never sent, `done_s` for one without an
    outcome. `kind`: str[n], `OK`, a gRPC status name such as `UNAVAILABLE`, or one of the client's own (see
    `open_loop`). `messages`: the first error text of each kind. `answers`: the serialised ModelInferResponse of each
    request if they are kept, else empty. `cpu_s`: processor time of all threads of the client process from the start of
    the clock to the last outcome.
    """

    intended_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    done_s: NDArray[np.float64]
    kind: NDArray[np.str_]
    messages: Mapping[str, str]
    cpu_s: float
    answers: tuple[bytes | None, ...] = ()

    @property
    def ok(self) -> NDArray[np.bool_]:
        """Which requests succeeded, bool[n]."""
        return np.asarray(self.kind == OK)

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """From the intended instant to the outcome, float64[n]; NaN for a request without an outcome."""
        return self.done_s - self.intended_s

    @property
    def lateness_s(self) -> NDArray[np.float64]:
        """From the intended instant to the sending, float64[n]; NaN for a request never sent."""
        return self.sent_s - self.intended_s

    def summary(self, slo_s: float | None = None) -> Summary:
        """The figures over all requests."""
        ok, planned = self.ok, len(self.kind)
        latency_ms = self.latency_s[ok] * 1e3
        lateness_ms = self.lateness_s[~np.isnan(self.sent_s)] * 1e3
        percentiles = {
            f"p{q}_ms": float(np.percentile(latency_ms, q)) if len(latency_ms) else None for q in (50, 90, 98, 99)
        }
        elapsed = float(self.done_s[ok].max() - self.intended_s[0]) if ok.any() else 0.0
        span = float(self.intended_s[-1] - self.intended_s[0])
        return Summary(
            planned=planned,
            sent=len(lateness_ms),
            ok=int(ok.sum()),
            failed=dict(Counter(self.kind[~ok].tolist()).most_common()),
            offered_per_s=(planned - 1) / span if span > 0 else 0.0,
            throughput_per_s=float(ok.sum()) / elapsed if elapsed > 0 else 0.0,
            mean_ms=float(latency_ms.mean()) if len(latency_ms) else None,
            max_ms=float(latency_ms.max()) if len(latency_ms) else None,
            **percentiles,
            within_slo=None if slo_s is None else float((latency_ms <= slo_s * 1e3).sum()) / planned,
            late=int((lateness_ms > LATE_S * 1e3).sum()),
            late_p99_ms=float(np.percentile(lateness_ms, 99)) if len(lateness_ms) else 0.0,
            late_max_ms=float(lateness_ms.max()) if len(lateness_ms) else 0.0,
            client_cpu_us=self.cpu_s / planned * 1e6,
        )


def head(sections: Mapping[str, str | Mapping[str, object]]) -> str:
    """Sections such as command, settings and hardware as text, one line each, without empty values."""
    lines = []
    for title, content in sections.items():
        if not isinstance(content, str):
            pairs = (f"{name}={value}" for name, value in content.items() if value not in (None, ""))
            content = ", ".join(pairs)
        lines.append(f"{title}: {content}")
    return "\n".join(lines)


def table(summary: Summary, messages: Mapping[str, str]) -> str:
    """The summary as text, one figure a line; `messages` explains each kind of failure."""
    rows = [
        ("requests", f"{summary.planned} planned, {summary.sent} sent, {summary.ok} ok"),
        ("rate", f"{summary.offered_per_s:.1f}/s offered, {summary.throughput_per_s:.1f}/s answered"),
    ]
    for name in ("mean", "p50", "p90", "p98", "p99", "max"):
        value = getattr(summary, f"{name}_ms")
        rows.append((f"latency {name}", "-" if value is None else f"{value:.2f} ms"))
    if summary.within_slo is not None:
        rows.append(("within SLO", f"{summary.within_slo:.2%} of all planned"))
    for kind, count in summary.failed.items():
        rows.append((f"failed {kind}", f"{count} (first: {messages.get(kind, '')})"))
    late = f"{summary.late} of {summary.sent} by more than {LATE_S * 1e3:g} ms"
    rows.append(("sent late", f"{late}, p99 {summary.late_p99_ms:.2f} ms, max {summary.late_max_ms:.2f} ms"))
    rows.append(("client CPU", f"{summary.client_cpu_us:.0f} us a request"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def write_json(
    path: Path,
    summary: Summary,
    messages: Mapping[str, str],
    sections: Mapping[str, str | Mapping[str, object]],
) -> None:
    """Write the sections of the head, `summary` and `messages` to `path` as one JSON object."""
    content: dict[str, Any] = {**sections, "summary": dataclasses.asdict(summary), "messages": dict(messages)}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
