"""A candidate table that was measured on another CPU, with latencies of the engines built here.

Accuracies, their bounds, shares and settings stay as profiled. Latencies are estimates: each level's time is that of
its engines at a short text, and a candidate's times change in the proportion of the levels that a text runs through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from shapeshift.cascade.candidates import Candidate, CandidateTable, LevelModel, ServingCandidate
from shapeshift.cascade.policy.selection import select
from shapeshift.engines.execution.engine_set import cost_curve
from shapeshift.engines.manifest import Manifest

# The bound of a candidate's accuracy may be this much below that of the one that was chosen on the other CPU.
MAX_LOSS = 0.005
_SHORT_TEXT = 24


def is_foreign(table: CandidateTable, engines: Mapping[str, Manifest]) -> bool:
    """Whether the table states another CPU than that of the engines. One that states none is used as it is."""
    hardware = table.origin.get("hardware")
    return hardware is not None and any(one.hardware != hardware for one in engines.values())


def on_this_machine(profiled: ServingCandidate, engines: Mapping[str, Manifest], source: str) -> ServingCandidate:
    """The table of `profiled` with latencies from `engines` (by model), and the candidate to serve.

    Candidates with a level that has no engines here are left out. source: what the table comes from, for its `origin`.
    The candidate is the fastest whose accuracy bound is at most half a point lower. A pinned one stays, and one without
    bound.
    """
    times = {name: _short_text_ms(one) for name, one in engines.items()}
    usable = [one for one in profiled.table.candidates if set(one.levels) <= set(times)]
    candidates = tuple(_timed(one, times) for one in usable)
    models = tuple(_timed_model(one, times) for one in profiled.table.models if one.name in times)
    hardware = next(iter(engines.values())).hardware
    origin = {
        **profiled.table.origin,
        "hardware": hardware,
        "latencies": "estimated from engine profiles",
        "source": source,
    }
    table = replace(profiled.table, origin=origin, models=models, candidates=candidates)
    same = table.candidate(profiled.candidate.name)
    stays = profiled.pinned or same.accuracy_bound is None
    fastest = None if stays else select(candidates, same.assured_accuracy - MAX_LOSS, float("inf"))
    return ServingCandidate(table, fastest or same, profiled.pinned)


def _timed_model(model: LevelModel, times: Mapping[str, float]) -> LevelModel:
    return replace(model, latency_ms=round(times[model.name], 4))


def _timed(one: Candidate, times: Mapping[str, float]) -> Candidate:
    after = [times[name] for name in one.levels]
    done = [0.0, *accumulate(one.shares)]
    reached = [1.0 - share for share in done[: len(after)]]
    mean = _ratio(after, one.model_latencies, reached)

    def at(quantile: float) -> float:
        """The ratio for the texts of that quantile, which run through the first levels only."""
        last = next((level for level, share in enumerate(done[1:]) if share >= quantile - 1e-9), len(after) - 1)
        return _ratio(after, one.model_latencies, [float(level <= last) for level in range(len(after))])

    return replace(
        one,
        model_latencies=tuple(round(ms, 4) for ms in after),
        latency_ms=one.latency_ms * mean,
        p75_ms=one.p75_ms * at(0.75),
        p99_ms=one.p99_ms * at(0.99),
    )


def _ratio(after: list[float], before: tuple[float, ...], weights: list[float]) -> float:
    old = sum(weight * ms for weight, ms in zip(weights, before, strict=True))
    return sum(weight * ms for weight, ms in zip(weights, after, strict=True)) / old if old else 1.0


def _short_text_ms(engines: Manifest) -> float:
    tokens = min(_SHORT_TEXT, engines.max_tokens)
    return float(min(cost_curve(entry, engines.max_tokens)[tokens] for entry in engines.engines))
