"""What the build prints of a model: how its engines were made, their deviation from the reference, their latency."""

from __future__ import annotations

from pathlib import Path

from shapeshift.build_engines.image.front import served
from shapeshift.engines.manifest import Manifest
from shapeshift.polymorph.policy.placement import Placement
from shapeshift.token_adapt.model.manifest import ImageManifest


def of_texts(name: str, result: Manifest, folder: Path, made: str, placement: Placement) -> str:
    """The table of a text model's engines. folder: that holds them; made: how."""
    lines = [_headline(name, result, folder, made)]
    if result.note:
        lines.append(result.note)
    header = f"{'engine':>9} {'rows':>5} {'max error':>10} {'cosine':>9}"
    lines.append(f"{header} {'at tokens':>10} {'median ms':>10} {'p99 ms':>8}")
    for entry in result.engines:
        left = f"{entry.name:>9} {entry.rows or 'any':>5} {entry.max_error:10.1e} {entry.min_cosine:9.6f}"
        times = [f"{point.tokens:10} {point.median_ms:10.2f} {point.p99_ms:8.2f}" for point in entry.latency]
        lines += _beside(left, times)
    workers = f", {placement.workers} workers" if placement.workers else ""
    return "\n".join([*lines, f"placement {placement.name}{workers}: {placement.reason}"])


def of_images(name: str, result: ImageManifest, folder: Path, made: str) -> str:
    """The table of an image model's engines, as `of_texts`, and what they serve."""
    header = f"{'gamma':>6} {'precision':>9} {'tokens':>7} {'max error':>10} {'cosine':>9} {'labels':>7}"
    lines = [_headline(name, result, folder, made), f"{header} {'images':>7} {'median ms':>10} {'p99 ms':>8}"]
    for entry in result.engines:
        labels = "" if entry.agreement is None else f"{entry.agreement:.1%}"
        quality = f"{entry.tokens:7} {entry.max_error:10.1e} {entry.min_cosine:9.6f} {labels:>7}"
        left = f"{entry.gamma:>6} {entry.precision:>9} {quality}"
        times = [f"{point.images:7} {point.median_ms:10.2f} {point.p99_ms:8.2f}" for point in entry.latency]
        lines += _beside(left, times)
    return "\n".join([*lines, f"serves {served(result)}"])


def _beside(left: str, times: list[str]) -> list[str]:
    """The lines `times`, the first of them right of `left`."""
    return [f"{left if index == 0 else ' ' * len(left)} {line}" for index, line in enumerate(times)]


def _headline(name: str, result: Manifest | ImageManifest, folder: Path, made: str) -> str:
    size = sum(entry.size for entry in result.files.values()) / 1e6
    return f"{name}: {made}; {result.provider} {result.provider_version}, {result.precision}, {size:.0f} MB in {folder}"
