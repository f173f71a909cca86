"""Placements over real engines: inline and resident beside DT and ST, through one Triton."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.common.cells import Cells
from bench.common.front_variants import ENGINES, baselines, publish_variant
from bench.common.output import BUILD, Row, empty
from bench.common.server import wait_loaded
from bench.common.texts import Outcome, TextBench, TritonModel, engines_alone
from bench.polymorph.fleet import running_fleet
from shapeshift.engines.manifest import Manifest

_WORKERS = 2


def measure(bench: TextBench, built: Manifest, folder: Path, clients: Sequence[int]) -> None:
    """Run closed loops on inline, resident, DT, ST and the engines alone."""
    repository = folder / "repository"
    empty(repository)
    count = str(_WORKERS)
    resident = {"placement": "resident", "workers": count, "max_workers": count, "min_workers": count}
    publish_variant("resident", built.engines, repository, packs_rows=True, parameters=resident)
    variants = baselines(built)
    for name, entries in variants.items():
        publish_variant(name, entries, repository)
    names = {"encode": "inline", "resident": "resident", **{name: name.upper() for name in variants}}
    workers = {"encode": 0, "resident": _WORKERS, **dict.fromkeys(variants, 0)}
    with ExitStack() as stack:
        server = stack.enter_context(running_fleet(folder, (BUILD / "repository", repository), workers))
        wait_loaded(server.metrics_url, (1 + _WORKERS) * len(built.engines) + len(variants))
        fronts = [TritonModel(names[front], server.grpc_url, front) for front in names]
        bare = engines_alone(ENGINES)
        stack.callback(bare.stop)
        bench.analyzed(fronts[:2], [bare], (1,))
        bench.closed([*fronts, bare], clients)


def ratios(cells: Cells[Outcome]) -> list[Row]:
    """The latency that is added, and the throughput of resident over the others."""
    rows: list[Row] = []
    bare_ms = cells.figure("perf_analyzer 1", "in-process", "p50_ms")
    for placement in ("inline", "resident"):
        added_ms = cells.figure("perf_analyzer 1", placement, "p50_ms") - bare_ms
        rows.append({"of": f"ms added by {placement}, p50, one in flight", "value": added_ms})
    for load in [load for load in cells.loads if load.startswith("closed")]:
        for other in [one for one in ("inline", "DT", "ST") if one in cells.systems(load)]:
            ratio = cells.over(load, "resident", other, "per_second")
            rows.append({"of": f"{load}: texts/s of resident over {other}", "value": ratio})
    return rows
