"""Metrics of a running server, as they stand now."""

from __future__ import annotations

from shapeshift.triton import metrics
from shapeshift.triton.embedded.server import TritonServer


def total(server: TritonServer, name: str, **labels: str) -> float:
    """The sum of the series `shapeshift_<name>` that have these labels, over processes and all other labels."""
    samples, wanted = metrics.scrape(server.metrics_url).items(), set(labels.items())
    return sum(value for (series, own), value in samples if series == f"shapeshift_{name}" and wanted <= own)
