"""Placements over real engines: inline, resident and partitioned beside DT and ST, through one Triton."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench import busy, report
from bench.cells import Bench
from bench.faults import Fault, Faults
from bench.fleet import BUILD, Measured, Running, fleet
from bench.loads import OpenSystem, TritonModel
from bench.systems import Worker, derive, dynamic_only, padded, wait_loaded
from bench.traces import capacity_per_s
from shapeshift.engines.ladder import rows_of
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest
from shapeshift.workloads import lengths

FRONT = "binned"
ENGINES = BUILD / "engines" / "encode"
_BUSY_S = 20.0
_EDGES = (64, 128, 256, 512)
_SLO_MS = 2000.0
# Of what the workers serve while all of them are busy: a load takes cores, too.
_REALLOCATING_LOAD = 0.4


def placements(bench: Bench, made: Manifest, house: Path, workers: int = 2) -> None:
    """Closed and, where they last, open loops on inline, resident, DT, ST, and the bare engines in a process."""
    repository = house / "repository"
    report.empty(repository)
    count = str(workers)
    resident = {"placement": "resident", "workers": count, "max_workers": count, "min_workers": count}
    derive("resident", made.engines, repository, BUILD, packs_rows=True, parameters=resident)
    derive("dt", dynamic_only(made), repository, BUILD)
    derive("st", padded(made), repository, BUILD)
    names = {"encode": "inline", "resident": "resident", "dt": "DT", "st": "ST"}
    fronts = {"encode": 0, "resident": workers, "dt": 0, "st": 0}
    with ExitStack() as stack:
        running = stack.enter_context(fleet(house, (BUILD / "repository", repository), fronts))
        wait_loaded(running.server.metrics_url, (1 + workers) * len(made.engines) + 2)
        systems = [TritonModel(names[front], running.server.grpc_url, front) for front in fronts]
        bare = Worker("in-process", "ladder", ENGINES)
        stack.callback(bare.stop)
        bench.analyzer(running.server.grpc_url, {"inline": "encode", "resident": "resident"}, bare, (1,))
        bench.closed([*systems, bare])
        if bench.scale.open_s:
            opened: Sequence[OpenSystem] = systems[:3]
            bench.open(opened, capacity_of="DT")


def partitioned(
    bench: Bench, made: Manifest, house: Path, processes: int, schemes: Mapping[str, dict[str, str]]
) -> str:
    """`processes` one-thread workers with one bin each on this machine's cores, profiled with all of them busy.

    One front for each of `schemes` (name: parameters), one after the other: the workers of several would
    disturb one another. Returns the profile in words.
    """
    times = busy.profile(ENGINES, _EDGES, processes, _BUSY_S)
    for name, parameters in schemes.items():
        with _binned(made, house, processes, times, parameters) as running:
            bench.closed([TritonModel(name, running.server.grpc_url, FRONT)])
    return ", ".join(f"{tokens}: {ms:.1f} ms" for tokens, ms in zip(_EDGES, times, strict=True))


def reallocations(made: Manifest, house: Path, processes: int, count: int, requests: int, seed: int) -> Fault:
    """`count` changes of bins under load over real engines, while `requests` texts are served."""
    times = busy.profile(ENGINES, _EDGES, processes, _BUSY_S / 2)
    curve = Measured(_EDGES, tuple(times))
    with _binned(made, house, processes, times, {}) as running:
        per_s = _REALLOCATING_LOAD * capacity_per_s(curve, _EDGES, processes)
        faults = Faults(running, FRONT, _EDGES, processes, per_s, seed)
        return faults.reallocations(count, max(requests / per_s, 10.0 + 6.0 * count))


@contextmanager
def _binned(
    made: Manifest, house: Path, processes: int, times: Sequence[float], parameters: Mapping[str, str]
) -> Iterator[Running]:
    """A server with one partitioned front of so many one-thread workers, and the scheduler."""
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
    repository = house / "repository"
    report.empty(repository)
    entries = [_entry(made, tokens, ms) for tokens, ms in zip(_EDGES, times, strict=True)]
    derive(FRONT, entries, repository, BUILD, parameters=stated)
    with fleet(house, (repository,), {FRONT: processes}) as running:
        yield running


def lines(bench: Bench, precision: str) -> Iterator[str]:
    """All cells, then what follows from them."""
    group = None
    for cell in report.cells(bench):
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


def _p50(bench: Bench, law: str, system: str) -> float:
    return bench.percentile(law, "perf_analyzer 1", system, 50)


def _entry(made: Manifest, tokens: int, ms: float) -> EngineEntry:
    dynamic = dynamic_only(made)[0]
    point = Latency(tokens, 1, ms, ms, ms)
    return replace(dynamic, tokens=tokens, rows=rows_of(tokens, False), latency=(point,))
