"""Tables and ratios of `bench.encode`."""

from __future__ import annotations

from collections.abc import Mapping

from bench.common.output import Row, table
from bench.common.text_bench import TextBench

OURS, IN_PROCESS, DYNAMIC, STATIC = "engine set", "in-process", "DT", "ST"


def tables(bench: TextBench, limits: Mapping[str, float]) -> str:
    """All cells, then the ratios. limits: the bound in texts a second, by length law."""
    shown = [bench.tables(law, limits[law]) for law in bench.scale.laws]
    return "\n".join([*shown, table("ratios", ratios(bench))])


def ratios(bench: TextBench) -> list[Row]:
    """The comparisons between medians of one run: of rates over 1, of latencies below 1, where ours is better."""
    rows: list[Row] = []
    for law in bench.scale.laws:
        alone, loaded = "perf_analyzer 1", "perf_analyzer 8"
        added = bench.percentile(law, alone, OURS, 50) - bench.percentile(law, alone, IN_PROCESS, 50)
        rows.append({"of": f"{law}: ms added by Triton and our backend, p50, one in flight", "value": added})
        share = bench.per_second(law, loaded, OURS) / bench.per_second(law, loaded, IN_PROCESS)
        rows.append({"of": f"{law}: texts/s through Triton over in-process, 8 in flight", "value": share})
        for load in bench.loads(law, DYNAMIC):
            others = [DYNAMIC, STATIC, *(name for name in bench.systems(law, load) if name.startswith("infinity"))]
            for other in [name for name in others if name in bench.systems(law, load)]:
                rate = bench.per_second(law, load, OURS) / bench.per_second(law, load, other)
                p98 = bench.percentile(law, load, OURS, 98) / bench.percentile(law, load, other, 98)
                rows.append({"of": f"{law}, {load}, over {other}: texts/s; p98", "value": rate, "p98": p98})
    return rows
