"""Placements over real engines: inline, resident and partitioned beside DT and ST, through one Triton."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.common.front_variants import ENGINES, dynamic_only, padded, publish_variant
from bench.common.output import BUILD, empty
from bench.common.server import wait_loaded
from bench.common.systems import EncodeWorker, OpenSystem, TritonModel
from bench.common.text_bench import TextBench
from bench.polymorph import busy_engines
from bench.polymorph.faults import Fault, FaultBench
from bench.polymorph.fleet import Fleet, LatencyCurve, running_fleet
from bench.polymorph.traces import capacity_per_s
from shapeshift.engines.execution.engine_set import row_slots
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest
from shapeshift.workloads import lengths

FRONT = "binned"
_BUSY_S = 20.0
_EDGES = (64, 128, 256, 512)
_SLO_MS = 2000.0
# Share of what the workers serve while all of them are busy: loading an engine takes cores as well.
_REALLOCATING_LOAD = 0.4


def placements(bench: TextBench, built: Manifest, folder: Path, workers: int = 2) -> None:
    """Run closed loops, and open loops where the scale has any, on inline, resident, DT, ST and the engines alone."""
    repository = folder / "repository"
    empty(repository)
    count = str(workers)
    resident = {"placement": "resident", "workers": count, "max_workers": count, "min_workers": count}
    publish_variant("resident", built.engines, repository, packs_rows=True, parameters=resident)
    publish_variant("dt", dynamic_only(built), repository)
    publish_variant("st", padded(built), repository)
    names = {"encode": "inline", "resident": "resident", "dt": "DT", "st": "ST"}
    fronts = {"encode": 0, "resident": workers, "dt": 0, "st": 0}
    with ExitStack() as stack:
        running = stack.enter_context(running_fleet(folder, (BUILD / "repository", repository), fronts))
        wait_loaded(running.server.metrics_url, (1 + workers) * len(built.engines) + 2)
        systems = [TritonModel(names[front], running.server.grpc_url, front) for front in fronts]
        bare = EncodeWorker("in-process", "in-process", ENGINES)
        stack.callback(bare.stop)
        bench.analyzer(running.server.grpc_url, {"inline": "encode", "resident": "resident"}, bare, (1,))
        bench.closed([*systems, bare])
        if bench.scale.open_s:
            opened: Sequence[OpenSystem] = systems[:3]
            bench.open(opened, capacity_of="DT")


def partitioned(
    bench: TextBench, built: Manifest, folder: Path, processes: int, schemes: Mapping[str, dict[str, str]]
) -> str:
    """`processes` one-thread workers with one bin each on this machine's cores, profiled with all of them busy.

    One front for each of `schemes` (name: parameters), one after another: workers of several fronts would disturb each
    other. Returns the profile in words.
    """
    times = busy_engines.profile(ENGINES, _EDGES, processes, _BUSY_S)
    for name, parameters in schemes.items():
        with _binned(built, folder, processes, times, parameters) as running:
            bench.closed([TritonModel(name, running.server.grpc_url, FRONT)])
    return ", ".join(f"{tokens}: {ms:.1f} ms" for tokens, ms in zip(_EDGES, times, strict=True))


def reallocations(built: Manifest, folder: Path, processes: int, count: int, requests: int, seed: int) -> Fault:
    """Change bins `count` times over real engines while `requests` texts are served."""
    times = busy_engines.profile(ENGINES, _EDGES, processes, _BUSY_S / 2)
    curve = LatencyCurve(_EDGES, tuple(times))
    with _binned(built, folder, processes, times, {}) as running:
        per_s = _REALLOCATING_LOAD * capacity_per_s(curve, _EDGES, processes)
        faults = FaultBench(running, FRONT, _EDGES, processes, per_s, seed)
        return faults.reallocations(count, max(requests / per_s, 10.0 + 6.0 * count))


@contextmanager
def _binned(
    built: Manifest, folder: Path, processes: int, times: Sequence[float], parameters: Mapping[str, str]
) -> Iterator[Fleet]:
    """A server with one partitioned front of so many one-thread workers, and its scheduler."""
    law = lengths.long().sample(np.random.default_rng(0), 20000)
    shares = np.bincount(np.searchsorted(_EDGES, law), minlength=len(_EDGES)) / len(law)
    count = str(processes)
    stated = {
        "placement": "partitioned",
        "workers": count,
        "max_workers": count,
        "min_workers": count,
        "slo_ms": f"{_SLO_MS:g}",
        "bin_edges": json.dumps(_EDGES),
        "plan_histogram": json.dumps([round(float(share), 6) for share in shares]),
        **parameters,
    }
    repository = folder / "repository"
    empty(repository)
    entries = [_entry(built, tokens, ms) for tokens, ms in zip(_EDGES, times, strict=True)]
    publish_variant(FRONT, entries, repository, parameters=stated)
    with running_fleet(folder, (repository,), {FRONT: processes}) as running:
        yield running


def lines(bench: TextBench, precision: str) -> Iterator[str]:
    """All cells, then the latency that is added and the ratios."""
    group = None
    for cell in bench.records():
        if (cell["lengths"], cell["load"]) != group:
            group = (cell["lengths"], cell["load"])
            yield f"\nreal engines, {precision}: {cell['lengths']} texts, {cell['load']}"
            yield f"  {'':34}{'texts/s':>9}{'mean ms':>9}{'p50 ms':>9}{'p98 ms':>9}{'failed':>7}{'foreign':>9}"
        yield (
            f"  {cell['system']:34}{cell['per_second']:9.1f}{cell['mean_ms']:9.2f}{cell['p50_ms']:9.2f}"
            f"{cell['p98_ms']:9.2f}{cell['failed']:7}{cell['foreign']:9.2f}"
        )
    for law in bench.scale.laws:
        for placement, what in (("inline", "Triton and front"), ("resident", "Triton, router and worker")):
            added = _p50(bench, law, placement) - _p50(bench, law, "in-process")
            yield f"  {law}: added by {what}, p50, perf_analyzer, concurrency 1: {added:.2f} ms"
        for load in [f"closed {concurrency}" for concurrency in bench.scale.concurrencies]:
            for other in ("inline", "DT", "ST"):
                ratio = bench.per_second(law, load, "resident") / bench.per_second(law, load, other)
                yield f"  {law}, {load}: throughput of resident over {other}: {ratio:.2f}"


def _p50(bench: TextBench, law: str, system: str) -> float:
    return bench.percentile(law, "perf_analyzer 1", system, 50)


def _entry(built: Manifest, tokens: int, ms: float) -> EngineEntry:
    dynamic = dynamic_only(built)[0]
    point = Latency(tokens, 1, ms, ms, ms)
    return replace(dynamic, tokens=tokens, rows=row_slots(tokens, False), latency=(point,))
