"""Tables, ratios and the plot of `bench.encode`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common.plots import figure
from bench.common.text_bench import TextBench

OURS, IN_PROCESS, DYNAMIC, STATIC = "engine set", "in-process", "DT", "ST"


def tables(bench: TextBench, precision: str, limits: Mapping[str, float]) -> str:
    """All cells, then the ratios. limits: the bound in texts a second, by length law."""
    lines = []
    group = None
    for cell in bench.records():
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
    return "\n".join(lines)


def ratios(bench: TextBench) -> Iterator[tuple[str, float]]:
    """The comparisons, as ratios between medians of one run; the first two rows are a difference and a share."""
    top = f"closed {bench.scale.concurrencies[-1]}"
    for law in bench.scale.laws:
        alone, loaded = "perf_analyzer 1", "perf_analyzer 8"
        added = bench.percentile(law, alone, OURS, 50) - bench.percentile(law, alone, IN_PROCESS, 50)
        yield f"{law}: added by Triton and our backend, p50, concurrency 1, ms", added
        share = bench.per_second(law, loaded, OURS) / bench.per_second(law, loaded, IN_PROCESS)
        yield f"{law}: throughput through Triton over in-process, concurrency 8", share
        for load in [load for (cell_law, load, system) in bench.outcomes if cell_law == law and system == DYNAMIC]:
            if load.startswith("closed"):
                ours = bench.per_second(law, load, OURS)
                yield f"{law}, {load}: throughput over DT", ours / bench.per_second(law, load, DYNAMIC)
            else:
                ours = bench.percentile(law, load, OURS, 98)
                yield f"{law}, {load}: p98 over DT's", ours / bench.percentile(law, load, DYNAMIC, 98)
        yield (
            f"{law}, {top}: throughput over ST",
            bench.per_second(law, top, OURS) / bench.per_second(law, top, STATIC),
        )
        yield from _against_infinity(bench, law)


def _against_infinity(bench: TextBench, law: str) -> Iterator[tuple[str, float]]:
    for concurrency in [c for c in bench.scale.concurrencies if c > 1]:
        load = f"closed {concurrency}"
        peers = [s for (*cell, s) in bench.outcomes if cell == [law, load] and s.startswith("infinity")]
        if peers:
            best = max(peers, key=lambda peer: bench.per_second(law, load, peer))
            ours = bench.per_second(law, load, OURS)
            yield f"{law}, {load}: throughput over {best}", ours / bench.per_second(law, load, best)
            ours = bench.percentile(law, load, OURS, 98)
            yield f"{law}, {load}: p98 over {best}'s", ours / bench.percentile(law, load, best, 98)


def plot(bench: TextBench, file: Path) -> None:
    """Draw throughput by concurrency, one panel a length law."""
    laws = bench.scale.laws
    with figure(file, len(laws), (6 * len(laws), 4), dpi=110) as panels:
        for panel, law in zip(panels, laws, strict=True):
            _throughput(bench, law, panel)


def _throughput(bench: TextBench, law: str, panel: Any) -> None:
    systems = list(dict.fromkeys(s for (cell_law, load, s) in bench.outcomes if cell_law == law and "closed" in load))
    for system in systems:
        values = [bench.per_second(law, f"closed {c}", system) for c in bench.scale.concurrencies]
        panel.plot(bench.scale.concurrencies, values, marker="o", label=system)
    panel.set(title=f"{law} texts", xlabel="requests in flight", ylabel="texts a second", xscale="log", ylim=(0, None))
    panel.set_xticks(bench.scale.concurrencies, labels=[str(c) for c in bench.scale.concurrencies])
    panel.legend(fontsize=8)
