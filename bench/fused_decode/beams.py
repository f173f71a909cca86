"""The part `beams` of the benchmark: beam search in our decode loop and in transformers.

A rate counts the tokens of the answers, not those of all beams. An answer comes as a whole when its search ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bench.fused_decode.cells import OURS, DecodeBench
from bench.fused_decode.loads import agreement
from bench.fused_decode.systems import ConfiguredWorker, DecodeSystem, DecodeWorker

BEAMS, REQUESTS = 4, 8
BATCH, ONE_BY_ONE = "transformers, one batch", "transformers, one by one"
LOAD = f"{REQUESTS} at once, {BEAMS} beams"
_COMPARED = 16
"""Tokens of each answer that are compared: later ones may follow from ties in rounding."""


def systems(ours: DecodeWorker, batching: DecodeWorker) -> list[DecodeSystem]:
    """Our loop, and transformers with all requests in one batch and with one request after another."""
    return [
        ConfiguredWorker(OURS, ours, num_beams=BEAMS),
        ConfiguredWorker(BATCH, batching, num_beams=BEAMS),
        ConfiguredWorker(ONE_BY_ONE, batching, num_beams=BEAMS, most=1),
    ]


def measure(bench: DecodeBench, searching: list[DecodeSystem]) -> None:
    """Measure all of them, in as many rounds as the loads that matter most."""
    bench.warm_up(searching)
    for _ in range(bench.scale.rounds):
        bench.measure(bench.loads.at_once(REQUESTS), searching, LOAD)


def ratios(bench: DecodeBench) -> Iterator[tuple[str, float, str]]:
    """As `report.ratios`."""
    goals: Mapping[str, str] = {BATCH: "5 or more", ONE_BY_ONE: ""}
    for system, goal in goals.items():
        if bench.has(LOAD, OURS, system):
            yield f"{LOAD}: tokens/s over {system}", bench.rate(LOAD, OURS) / bench.rate(LOAD, system), goal
            pairs = zip(bench.runs[LOAD, OURS], bench.runs[LOAD, system], strict=False)
            alike = [agreement(ours.replayed, other.replayed, _COMPARED) for ours, other in pairs]
            yield f"{LOAD}: share of the first {_COMPARED} tokens as of {system}", sum(alike) / len(alike), ""
