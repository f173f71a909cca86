"""What `shapeshift plan` buys for the Azure trace, on a real server with emulated workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bench.common.public_data import SAMPLES
from bench.polymorph.fleet import PROFILE, emulated_front, running_fleet
from bench.polymorph.traces import planned
from client.open_loop import replay
from shapeshift.cli.main import main
from shapeshift.simulate import plan

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1200)]

# Latencies beside which those of a busy machine are small.
SLOWER = 2.0
OBJECTIVE_MS = 1500.0
SHARE = 0.95
CASE = f"""
[load]
arrivals = "csv"
trace = "{SAMPLES.resolve()}/azure_llm_2023/conv.csv"
rate_factor = 1.5
duration_s = 80
max_length = 512
[slo]
latency_ms = {OBJECTIVE_MS}
share = {SHARE}
margin = 0
[polymorph]
placement = "partitioned"
[workers.emulated]
profile = "{PROFILE.resolve()}"
slower = {SLOWER}
price = 1
most = 12
packing = false
dynamic = false
"""


def test_the_plan_for_azures_trace_holds_on_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_text(CASE)
    assert main(["plan", str(tmp_path / "plan.toml"), "--json"]) == 0
    parameters: dict[str, Any] = json.loads(capsys.readouterr().out)["parameters"]
    workers = parameters.pop("workers")
    _, trace = plan.read(tmp_path / "plan.toml")
    fronts = {"bought": workers, "fewer": workers - 1}
    for name, count in fronts.items():
        counts = dict.fromkeys(("workers", "min_workers", "max_workers"), count)
        waiting = {"slo_ms": OBJECTIVE_MS, "queue_rows": 100_000, "max_queue_ms": 0}
        repository = emulated_front(tmp_path, name, trace.length.tolist(), SLOWER, **parameters, **counts, **waiting)
    shares = {}
    # The first plan stays, as the one that was bought.
    with running_fleet(tmp_path, (repository,), fronts, period_s=600.0) as server:
        for name in fronts:
            report = asyncio.run(
                replay(server.grpc_url, name, planned(trace, 0), timeout_s=300.0, max_in_flight=100_000)
            )
            shares[name] = float((report.ok & (report.latency_s * 1e3 <= OBJECTIVE_MS)).mean())
            print(f"{name}: {fronts[name]} workers, {shares[name]:.3f} in time, {report.messages}")
    assert shares["bought"] >= SHARE > shares["fewer"], shares
