"""The queries of OTAS' evaluation: Table II, all types equally frequent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shapeshift.workloads.trace import Trace

TABLE_II = (
    ("CIFAR10", 600.0, 0.3),
    ("CIFAR10", 1000.0, 0.01),
    ("CIFAR100", 600.0, 1.0),
    ("CIFAR100", 1000.0, 0.2),
    ("EuroSAT", 600.0, 0.3),
    ("EuroSAT", 1000.0, 0.01),
)
"""Data set, latency requirement in ms, utility."""


def with_queries(requests: Trace, rng: np.random.Generator) -> Trace:
    """The requests with a task, a latency requirement and a utility each."""
    kinds = rng.integers(0, len(TABLE_II), len(requests))
    tasks, latency_ms, utility = (np.array(column)[kinds] for column in zip(*TABLE_II, strict=True))
    return replace(requests, task=tasks, latency_ms=latency_ms, utility=utility)
