"""Small scenarios, one of each technique."""

from __future__ import annotations

from typing import Any

PROFILE: dict[str, Any] = {"lengths": [8, 64, 512], "latency_ms": [4.0, 16.0, 100.0]}
TEXTS = """
seed = 3
[load]
rate = 40
duration_s = 20
lengths = "long"
[polymorph]
profile = "profile.json"
bins = [64, 512]
placement = "partitioned"
workers = 8
slo_ms = 400
[sidecar]
plan_period_s = 5
[compare.paper]
dispatch = "multilevel"
curve = "clamped"
"""
IMAGES: tuple[str, dict[str, Any]] = (
    """
[load]
arrivals = "fluctuating"
rate = 60
duration_s = 20
otas = true
[token_adapt]
profile = "images.json"
memory_mb = 1000
[tasks.CIFAR10]
"-8" = 0.8
"0" = 0.9
[tasks.CIFAR100]
"-8" = 0.7
"0" = 0.8
[tasks.EuroSAT]
"-8" = 0.9
"0" = 0.95
[compare.plain]
algorithm = "by_rate"
use_gammas = "0"
""",
    {
        "profiles": [
            {"gamma": -8, "tokens": 9, "latency_ms": {"1": 8.0, "16": 128.0}, "memory_mb": 3.0},
            {"gamma": 0, "tokens": 197, "latency_ms": {"1": 25.0, "16": 400.0}, "memory_mb": 3.0},
        ]
    },
)
ADAPTERS = """
[load]
rate = 20
duration_s = 30
lengths = "lengths.csv"
adapters = 20
[adapter_cache]
slots = 8
prefill_tokens = 64
base_s = 0.002
row_s = 0.0002
token_s = 0.00002
rank_s = 0.0
load_bytes_s = 2e7
pool_bytes = 40000000
token_bytes = 1000
rank_bytes = 10000
predictor = "mean"
[compare."no cache"]
eviction = "unused"
"""
DECODE = """
[load]
rate = 20
duration_s = 30
lengths = "lengths.csv"
[fused_decode]
slots = 8
base_s = 0.01
row_s = 0.001
[compare.window]
batching = "window"
"""
CASCADE = """
[load]
rate = 400
duration_s = 10
[cascade]
candidates = "table.json"
cutoff = 0.6
[compare.cut]
routing = "cut"
[compare.dead]
kill_s = 2
"""
