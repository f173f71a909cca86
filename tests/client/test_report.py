from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from client import report
from client.report import Report


def made(kinds: list[str], latency_s: list[float], late_s: float = 0.0) -> Report:
    intended = np.arange(len(kinds)) * 0.1
    return Report(
        intended_s=intended,
        sent_s=intended + late_s,
        done_s=intended + np.array(latency_s),
        kind=np.array(kinds),
        messages={"UNAVAILABLE": "queue full"},
        cpu_s=0.001 * len(kinds),
    )


def test_latencies_are_those_of_successful_requests() -> None:
    summary = made(["OK", "OK", "OK", "UNAVAILABLE"], [0.1, 0.2, 0.3, 50.0]).summary(slo_s=0.25)
    assert summary.mean_ms == pytest.approx(200)
    assert summary.p50_ms == pytest.approx(200)
    assert summary.max_ms == pytest.approx(300)
    assert summary.within_slo == 0.5
    assert summary.offered_per_s == pytest.approx(10)
    assert summary.throughput_per_s == pytest.approx(3 / 0.5)
    assert summary.client_cpu_us == pytest.approx(1000)


def test_percentiles_are_ordered() -> None:
    latency = np.random.default_rng(0).exponential(1.0, 1000)
    summary = made(["OK"] * 1000, latency.tolist()).summary()
    values = [summary.p50_ms, summary.p90_ms, summary.p98_ms, summary.p99_ms, summary.max_ms]
    assert values == sorted(values)  # type: ignore[type-var]
    assert summary.p98_ms == pytest.approx(np.quantile(latency, 0.98) * 1e3)
    assert summary.within_slo is None


def test_late_sends_are_counted() -> None:
    assert made(["OK"] * 4, [1.0] * 4, late_s=0.0005).summary().late == 0
    summary = made(["OK"] * 4, [1.0] * 4, late_s=0.002).summary()
    assert summary.late == 4
    assert summary.late_max_ms == pytest.approx(2)


def test_a_replay_without_answers_has_no_figures() -> None:
    result = made(["UNAVAILABLE"] * 3, [0.1] * 3)
    summary = result.summary(slo_s=1.0)
    assert (summary.ok, summary.throughput_per_s, summary.mean_ms, summary.p99_ms) == (0, 0.0, None, None)
    assert summary.within_slo == 0
    text = report.table(summary, result.messages)
    assert "failed UNAVAILABLE  3 (first: queue full)" in text
    assert "latency p98         -" in text


def test_the_head_omits_empty_values() -> None:
    text = report.head({"command": "python x", "settings": {"rate": 5.0, "json": "", "slo_ms": None}})
    assert text == "command: python x\nsettings: rate=5.0"


def test_the_json_file_has_all_sections(tmp_path: Path) -> None:
    result = made(["OK", "UNAVAILABLE"], [0.1, 0.1])
    path = tmp_path / "report.json"
    report.write_json(path, result.summary(), result.messages, {"command": "c", "settings": {"seed": 3}})
    content = json.loads(path.read_text())
    assert content["settings"] == {"seed": 3}
    assert content["summary"]["ok"] == 1
    assert content["summary"]["failed"] == {"UNAVAILABLE": 1}
    assert content["messages"] == {"UNAVAILABLE": "queue full"}
