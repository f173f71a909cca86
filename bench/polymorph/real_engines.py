"""Placements over real engines: inline and resident beside DT and ST, through one Triton."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from bench.common.front_variants import ENGINES, dynamic_only, padded, publish_variant
from bench.common.output import BUILD, Row, empty
from bench.common.server import wait_loaded
from bench.common.systems import EncodeWorker, TritonModel
from bench.common.text_bench import TextBench
from bench.polymorph.fleet import running_fleet
from shapeshift.engines.manifest import Manifest

_WORKERS = 2


def measure(bench: TextBench, built: Manifest, folder: Path) -> None:
    """Run closed loops, and open loops where the scale has any, on inline, resident, DT, ST and the engines alone."""
    repository = folder / "repository"
    empty(repository)
    count = str(_WORKERS)
    resident = {"placement": "resident", "workers": count, "max_workers": count, "min_workers": count}
    publish_variant("resident", built.engines, repository, packs_rows=True, parameters=resident)
    publish_variant("dt", dynamic_only(built), repository)
    publish_variant("st", padded(built), repository)
    names = {"encode": "inline", "resident": "resident", "dt": "DT", "st": "ST"}
    fronts = {"encode": 0, "resident": _WORKERS, "dt": 0, "st": 0}
    with ExitStack() as stack:
        server = stack.enter_context(running_fleet(folder, (BUILD / "repository", repository), fronts))
        wait_loaded(server.metrics_url, (1 + _WORKERS) * len(built.engines) + 2)
        systems = [TritonModel(names[front], server.grpc_url, front) for front in fronts]
        bare = EncodeWorker("in-process", "in-process", ENGINES)
        stack.callback(bare.stop)
        bench.analyzer(server.grpc_url, {"inline": "encode", "resident": "resident"}, bare, (1,))
        bench.closed([*systems, bare])
        if bench.scale.open_s:
            bench.open(systems[:3], capacity_of="DT")


def ratios(bench: TextBench) -> list[Row]:
    """The latency that is added, and the throughput of resident over the others."""
    rows: list[Row] = []
    for law in bench.scale.laws:
        bare_ms = bench.percentile(law, "perf_analyzer 1", "in-process", 50)
        for placement in ("inline", "resident"):
            added_ms = bench.percentile(law, "perf_analyzer 1", placement, 50) - bare_ms
            rows.append({"of": f"{law}: ms added by {placement}, p50, one in flight", "value": added_ms})
        for concurrency in bench.scale.concurrencies:
            load = f"closed {concurrency}"
            for other in ("inline", "DT", "ST"):
                ratio = bench.per_second(law, load, "resident") / bench.per_second(law, load, other)
                rows.append({"of": f"{law}, {load}: texts/s of resident over {other}", "value": ratio})
    return rows
