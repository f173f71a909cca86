"""Tables, ratios and the plot of `bench.encode`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.cells import Bench


def empty(folder: Path) -> None:
    """Make `folder` anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def cells(bench: Bench) -> list[dict[str, Any]]:
    """Every cell as a plain record; several rounds give their medians."""
    return [
        {
            "lengths": law,
            "load": load,
            "system": system,
            "rounds": len(outcomes),
            "per_second": round(bench.per_second(law, load, system), 2),
            "mean_ms": round(float(np.median([o.latency_ms.mean() for o in outcomes])), 3),
            "p50_ms": round(bench.percentile(law, load, system, 50), 3),
            "p98_ms": round(bench.percentile(law, load, system, 98), 3),
            "failed": sum(outcome.failed for outcome in outcomes),
            "foreign": round(float(np.median(bench.foreign[law, load, system])), 2),
        }
        for (law, load, system), outcomes in bench.outcomes.items()
    ]


def tables(bench: Bench, precision: str, limits: Mapping[str, float]) -> str:
    """All cells, then the ratios that matter."""
    lines = []
    group = None
    for cell in cells(bench):
        if (cell["lengths"], cell["load"]) != group:
            group = (cell["lengths"], cell["load"])
            lines.append(f"\n{cell['lengths']} texts, {cell['load']} (bound {limits[cell['lengths']]:.0f}/s)")
            lines.append(
                f"  {'':24}{'texts/s':>9}{'of bound':>9}{'mean ms':>9}{'p50 ms':>9}{'p98 ms':>9}"
                f"{'failed':>7}{'foreign':>9}"
            )
        share = cell["per_second"] / limits[cell["lengths"]]
        lines.append(
            f"  {cell['system']:24}{cell['per_second']:9.1f}{share:9.0%}{cell['mean_ms']:9.2f}"
            f"{cell['p50_ms']:9.2f}{cell['p98_ms']:9.2f}{cell['failed']:7}{cell['foreign']:9.2f}"
        )
    lines.append(f"\nratios, {precision}")
    lines += [f"  {what:72} {value:8.2f}" for what, value in ratios(bench)]
    return "\n".join(lines) + "\n"


def ratios(bench: Bench) -> Iterator[tuple[str, float]]:
    """What is claimed, as ratios between medians of one run (the first two rows: a difference, and a share)."""
    top = f"closed {bench.scale.concurrencies[-1]}"
    for law in bench.scale.laws:
        alone, loaded = "perf_analyzer 1", "perf_analyzer 8"
        added = bench.percentile(law, alone, "ladder", 50) - bench.percentile(law, alone, "in-process", 50)
        yield f"{law}: added by Triton and our backend, p50, concurrency 1, ms", added
        share = bench.per_second(law, loaded, "ladder") / bench.per_second(law, loaded, "in-process")
        yield f"{law}: throughput through Triton over in-process, concurrency 8", share
        for load in [load for (known, load, system) in bench.outcomes if known == law and system == "DT"]:
            if load.startswith("closed"):
                ours = bench.per_second(law, load, "ladder")
                yield f"{law}, {load}: throughput over DT", ours / bench.per_second(law, load, "DT")
            else:
                ours = bench.percentile(law, load, "ladder", 98)
                yield f"{law}, {load}: p98 over DT's", ours / bench.percentile(law, load, "DT", 98)
        yield (
            f"{law}, {top}: throughput over ST",
            bench.per_second(law, top, "ladder") / bench.per_second(law, top, "ST"),
        )
        yield from _against_infinity(bench, law)


def _against_infinity(bench: Bench, law: str) -> Iterator[tuple[str, float]]:
    for concurrency in [c for c in bench.scale.concurrencies if c > 1]:
        load = f"closed {concurrency}"
        peers = [s for (known, at, s) in bench.outcomes if known == law and at == load and s.startswith("infinity")]
        if peers:
            best = max(peers, key=lambda peer: bench.per_second(law, load, peer))
            ours = bench.per_second(law, load, "ladder")
            yield f"{law}, {load}: throughput over {best}", ours / bench.per_second(law, load, best)
            ours = bench.percentile(law, load, "ladder", 98)
            yield f"{law}, {load}: p98 over {best}'s", ours / bench.percentile(law, load, best, 98)


def plot(bench: Bench, file: Path) -> None:
    """Throughput by concurrency, one panel a length law."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(bench.scale.laws), figsize=(6 * len(bench.scale.laws), 4), squeeze=False)
    for panel, law in zip(panels[0], bench.scale.laws, strict=True):
        systems = list(dict.fromkeys(s for (known, load, s) in bench.outcomes if known == law and "closed" in load))
        for system in systems:
            values = [bench.per_second(law, f"closed {c}", system) for c in bench.scale.concurrencies]
            panel.plot(bench.scale.concurrencies, values, marker="o", label=system)
        panel.set(
            title=f"{law} texts", xlabel="requests in flight", ylabel="texts a second", xscale="log", ylim=(0, None)
        )
        panel.set_xticks(bench.scale.concurrencies, labels=[str(c) for c in bench.scale.concurrencies])
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
