"""Chameleon: its Figs. 10 to 18 over a simulated decode loop, under the schedulers and the cache that serve.

The machine is a Llama of 7 billion parameters on the paper's GPU, read from its figures, in three regimes
(`bench.adapter_cache.simulated`). Loads are shares of what S-LoRA's system bears; the paper's 6, 8 and 9 requests a
second are 69, 92 and 103% of its 8.7. S-LoRA is first in, first out, without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from bench.adapter_cache import chats, report
from bench.adapter_cache.report import CACHE, DEFAULT, PLAIN, QUEUES, AdapterRun
from bench.adapter_cache.simulated import PARTS, Regime, System, regimes, scheduled
from bench.papers.findings import OTHER, Findings, verdict
from shapeshift.adapter_cache.policy.eviction import EvictEntry
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import EVICTION_RULES, UNUSED
from shapeshift.simulate.adapter_pool import CacheOptions
from shapeshift.workloads.adapters import RANKS, names

LOADS = (0.69, 0.92, 1.03, 1.2)
NO_CACHE = "chameleon, no cache"
_SHOWN = (PLAIN, CACHE, NO_CACHE, QUEUES, DEFAULT, "sjf, cache", "wrs, cache")
_REQUESTS, _SEEDS = 500, 3
_MODELS = {"7B": (1.0, 1.0, 500), "13B": (1.9, 1.5, 100), "30B": (4.4, 3.0, 10)}
"""Of 7B's: the weights, which take the time of iterations, the memory of a token; and adapters (section 5.5)."""
_GPUS_GIB = (24, 48, 80)
_WEIGHTS_GIB = {"7B": 13, "13B": 25, "30B": 61}

Runs = Sequence[AdapterRun]


def measure(findings: Findings, seed: int) -> None:
    """All of them."""
    count, seeds = max(60, int(_REQUESTS * findings.scale)), [seed * 100 + number for number in range(_SEEDS)]
    every = regimes()
    _evictions(findings, every[0], seeds)
    _first_tokens(findings, every, count, seeds)
    link = every[-1]
    _schedulers(findings, every[1], count, seeds)
    _rules(findings, link, count, seeds)
    _prefetch(findings, link, count, seeds)
    _predictors(findings, every[0], count, seeds)
    _trained(findings)
    _sizes(findings, every[0], count, seeds)


def _record(runs: Runs) -> dict[str, float]:
    """The figures of a system, its throughput by what it served."""
    return {name: value for name, value in report.record(runs).items() if name != "runs"}


def _loads(
    findings: Findings, regime: Regime, count: int, seeds: Sequence[int]
) -> tuple[dict[float, dict[str, dict[str, float]]], float]:
    """The figures of each system by load; and the objective in ms, 5 times the time of a request at a low load."""
    capacity = regime.capacity(count)
    slo_ms = 5e3 * float(np.mean([regime.replay(PARTS[PLAIN], 0.05 * capacity, count, one).last_s for one in seeds]))
    tables: dict[float, dict[str, dict[str, float]]] = {}
    for load in LOADS:
        runs = {name: [regime.replay(PARTS[name], capacity * load, count, one) for one in seeds] for name in _SHOWN}
        tables[load] = {name: _record(of) for name, of in runs.items()}
        title = f"{regime.name}, {load:.0%} of {capacity:.2f} requests/s, objective {slo_ms:.0f} ms"
        findings.table("Figs. 10 to 12", title, [{"system": name, **row} for name, row in tables[load].items()])
    return tables, slo_ms


def _first_tokens(findings: Findings, every: Sequence[Regime], count: int, seeds: Sequence[int]) -> None:
    """Figs. 10 to 12, in each regime."""
    regimes_of = {regime.name: _loads(findings, regime, count, seeds) for regime in every}
    for where, figure, said in (
        ("Fig. 10", "first_p99_ms", "15, 25, 81%"),
        ("Fig. 12", "first_p50_ms", "14, 21, 48%"),
    ):
        lower = {
            (name, system): [1 - tables[load][system][figure] / tables[load][PLAIN][figure] for load in LOADS[:3]]
            for name, (tables, _) in regimes_of.items()
            for system in (QUEUES, DEFAULT)
        }
        findings.claim(
            where,
            f"{figure[6:9].upper()} to the first token lower by {said}",
            "; ".join(f"{name}: {_percents(of)}" for (name, system), of in lower.items() if system == QUEUES)
            + f"; our default there {_percents(lower[every[-1].name, DEFAULT])}",
            verdict(*(min(of) > 0.1 for (_, system), of in lower.items() if system == QUEUES)),
        )
    between = {
        system: max(tables[load][system]["between_p99_ms"] for tables, _ in regimes_of.values() for load in LOADS[:3])
        for system in (QUEUES, PLAIN)
    }
    findings.claim(
        "Fig. 11",
        "P99 between tokens not above S-LoRA's, both below 150 ms",
        f"at most {between[QUEUES]:.0f} and {between[PLAIN]:.0f} ms",
        verdict(between[QUEUES] <= between[PLAIN], between[QUEUES] < 150),
    )
    reach = {
        (name, system): max((load for load in LOADS if tables[load][system]["first_p99_ms"] <= slo_ms), default=0.0)
        for name, (tables, slo_ms) in regimes_of.items()
        for system in (PLAIN, CACHE, NO_CACHE, QUEUES)
    }
    findings.claim(
        "Fig. 10",
        "throughput at the objective: 1.2 times with the cache, 1.1 with the queues, 1.5 with both",
        "highest load that holds, S-LoRA, cache, queues, both: "
        + "; ".join(_percents([load for (of, _), load in reach.items() if of == name]) for name in regimes_of),
        verdict(*(reach[name, QUEUES] > reach[name, PLAIN] for name in regimes_of)),
    )


def _percents(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0%}" for value in values)


def _schedulers(findings: Findings, regime: Regime, count: int, seeds: Sequence[int]) -> None:
    """Fig. 13: no starvation."""
    systems = {**PARTS, "sjf, no cache": System(scheduled("sjf"), CacheOptions(eviction=UNUSED))}
    rate = regime.capacity(count) * 1.03
    shown = (PLAIN, "sjf, no cache", NO_CACHE, QUEUES, DEFAULT)
    rows = {name: _record([regime.replay(systems[name], rate, count, one) for one in seeds]) for name in shown}
    findings.table("Fig. 13", f"{regime.name}, 103%", [{"system": name, **row} for name, row in rows.items()])
    p99 = {name: row["first_p99_ms"] / rows[PLAIN]["first_p99_ms"] for name, row in rows.items()}
    findings.claim(
        "Fig. 13",
        "the queues alone far below FIFO and SJF in P99, nobody starves",
        ", ".join(f"{name} {value:.2f}" for name, value in p99.items() if name != PLAIN)
        + f" of FIFO's; longest wait {rows[QUEUES]['longest_s']:.0f} s, FIFO {rows[PLAIN]['longest_s']:.0f} s",
        verdict(p99[NO_CACHE] < 1, p99[NO_CACHE] < p99["sjf, no cache"]),
        "in overload an order only moves waits between requests",
    )


def _rules(findings: Findings, regime: Regime, count: int, seeds: Sequence[int]) -> None:
    """Fig. 14: P99 by rank, over S-LoRA's."""
    rate, base = regime.capacity(count) * 0.92, PARTS[PLAIN]
    by_rule: dict[str, dict[str, float]] = {}
    for rule in (UNUSED, "lru", "fair", "score", "gdsf"):
        system = replace(base, caching=CacheOptions(eviction=rule))
        first: dict[str, list[float]] = {}
        for one in seeds:
            ranks = [request.adapter for request in regime.requests(rate, count, one)]
            run = regime.replay(system, rate, count, one)
            for adapter, seconds in zip(ranks, run.first_s.tolist(), strict=True):
                for group in ("all", str(adapter).partition("-")[0]):
                    first.setdefault(group, []).append(seconds)
        by_rule[rule] = {group: float(np.percentile(times, 99)) for group, times in first.items()}
    groups = ["all", *(f"r{rank}" for rank in RANKS)]
    ratios = {
        rule: {group: of[group] / by_rule[UNUSED][group] for group in groups}
        for rule, of in by_rule.items()
        if rule != UNUSED
    }
    findings.table("Fig. 14", f"{regime.name}, 92%: P99 over S-LoRA's", [{"rule": r, **of} for r, of in ratios.items()])
    findings.claim(
        "Fig. 14",
        "P99 lower by LRU 18%, FairShare 22%, Chameleon's score 26%, rank 128 most",
        ", ".join(f"{rule} {1 - of['all']:.0%} (rank 128 {1 - of['r128']:.0%})" for rule, of in ratios.items()),
        verdict(ratios["score"]["all"] < 1, ratios["score"]["all"] < ratios["lru"]["all"]),
        f"gdsf is the default; {regime.name}",
    )


def _evictions(findings: Findings, regime: Regime, seeds: Sequence[int]) -> None:
    """Hits and bytes of the rules alone."""
    uses = max(2000, int(20000 * findings.scale))
    rows = evictions(regime.adapters, regime.cache_bytes, uses, seeds)
    share = regime.cache_bytes / sum(one.bytes for one in regime.adapters.values())
    findings.table("section 4.1", f"{uses} uses, a cache of {share:.0%} of all adapters", list(rows.values()))
    findings.claim(
        "section 4.1",
        "the score loads less than LRU",
        ", ".join(f"{n} {row['of the bytes']:.2f} of the bytes, {row['hits']:.0%} hits" for n, row in rows.items()),
        verdict(float(rows["score"]["of the bytes"]) < float(rows["lru"]["of the bytes"])),
        "what the score prefers, large adapters, takes the room of many small ones",
    )


def evictions(
    adapters: Mapping[str, AdapterInfo], capacity: float, uses: int, seeds: Sequence[int]
) -> dict[str, dict[str, str | float]]:
    """By rule: bytes loaded, as a share of those without a cache, and hits over `uses` adapters drawn for each of
    `seeds`; `capacity` bytes of cache."""
    drawn = [names(len(adapters), uses, np.random.default_rng(seed)) for seed in seeds]
    uncached_bytes = sum(adapters[name].bytes for one in drawn for name in one)
    rows: dict[str, dict[str, str | float]] = {}
    # Without a cache nothing is evicted.
    for rule in [name for name in EVICTION_RULES if name != UNUSED]:
        loaded, hits = np.sum([_evicted(adapters, capacity, one, rule) for one in drawn], axis=0).tolist()
        rows[rule] = {"rule": rule, "of the bytes": loaded / uncached_bytes, "hits": hits / (uses * len(seeds))}
    return rows


def _evicted(adapters: Mapping[str, AdapterInfo], capacity: float, used: Sequence[str], rule: str) -> tuple[float, int]:
    """Bytes loaded, and the number of uses that hit."""
    cached: dict[str, EvictEntry] = {}
    counts: dict[str, int] = {}
    free, clock, loaded, hits = capacity, 0.0, 0.0, 0
    for now, name in enumerate(used):
        size = adapters[name].bytes
        counts[name] = counts.get(name, 0) + 1
        if name in cached:
            hits += 1
        else:
            evicted, clock = EVICTION_RULES[rule].choose(list(cached.values()), size - free, clock, now)
            free += sum(cached.pop(one).size for one in evicted or ()) - size
            loaded += size
            cached[name] = EvictEntry(name, size, 0, now)
        cached[name] = replace(cached[name], freq=counts[name], last=now, base=clock)
    return loaded, hits


def _prefetch(findings: Findings, regime: Regime, count: int, seeds: Sequence[int]) -> None:
    """Fig. 15."""
    rate, base = regime.capacity(count) * 0.92, PARTS[QUEUES]
    first = {
        prefetch: report.first_ms(
            [regime.replay(replace(base, caching=CacheOptions("score", prefetch)), rate, count, one) for one in seeds],
            99,
        )
        for prefetch in (False, True)
    }
    findings.claim(
        "Fig. 15",
        "prefetching lowers the P99 by a further 8.8%",
        f"by {1 - first[True] / first[False]:.1%}, {regime.name}",
        verdict(first[True] < 0.98 * first[False]),
        "histograms of gaps, as in the paper",
    )


def _predictors(findings: Findings, regime: Regime, count: int, seeds: Sequence[int]) -> None:
    """Fig. 16, with an oracle."""
    rate = regime.capacity(count) * 1.03
    rows = [
        {
            "right": accuracy,
            **{
                name: report.first_ms([regime.replay(PARTS[of], rate, count, one, accuracy) for one in seeds], 99)
                for name, of in (("output alone (sjf)", "sjf, cache"), ("chameleon", QUEUES))
            },
        }
        for accuracy in (1.0, 0.8, 0.6)
    ]
    findings.table("Fig. 16", f"P99 to the first token, ms, {regime.name}, 103%", rows)
    of = {name: [row[name] for row in rows] for name in ("output alone (sjf)", "chameleon")}
    findings.claim(
        "Fig. 16",
        "80% right loses next to nothing, 60% more by output length alone than by Chameleon",
        "; ".join(f"{n}: {v[1] / v[0] - 1:+.0%} at 80%, {v[2] / v[0] - 1:+.0%} at 60%" for n, v in of.items()),
        verdict(
            of["chameleon"][1] < 1.1 * of["chameleon"][0],
            of["chameleon"][2] / of["chameleon"][0] <= of["output alone (sjf)"][2] / of["output alone (sjf)"][0],
        ),
    )


def _trained(findings: Findings) -> None:
    """Fig. 16 with the predictor that is trained on SmolLM2's answers."""
    rows = chats.measure(max(2, int(8 * findings.scale)), max(200, int(800 * findings.scale)))
    for name, of_machine in rows.items():
        findings.table("Fig. 16", f"SmolLM2's chats, {name}: first token over that of `arrival`", of_machine)
    near = next(row for row in rows["the demo"] if row["load"] == 0.85 and row["scheduler"] == "chameleon")
    findings.claim(
        "Fig. 16",
        "a trained predictor is as good as one that is always right",
        f"mean to the first token at 85% of the demo's load, over `arrival`'s: words {near['words: mean']}, "
        f"right {near['right: mean']}, adapters' means {near['mean: mean']}",
        verdict(float(near["words: mean"]) < float(near["mean: mean"])),
        "the predictor of checkpoints/smollm2-adapters",
    )


def _sizes(findings: Findings, base: Regime, count: int, seeds: Sequence[int]) -> None:
    """Figs. 17 and 18: larger models and memories."""
    rows: list[dict[str, str | float]] = []
    for model, (weights, token, adapters) in _MODELS.items():
        for gib in _GPUS_GIB:
            free = gib - _WEIGHTS_GIB[model]
            if free < 6:
                continue
            regime = base.scaled(weights, token, adapters, free)
            rate = 0.92 * regime.capacity(count)
            runs = {
                name: [regime.replay(PARTS[name], rate, count, one) for one in seeds]
                for name in (PLAIN, QUEUES, DEFAULT)
            }
            p99 = {name: report.first_ms(of, 99) for name, of in runs.items()}
            row: dict[str, str | float] = {"model": model, "GiB": gib, "adapters": adapters, "requests/s": rate}
            rows.append(row | {name: p99[name] / p99[PLAIN] for name in (QUEUES, DEFAULT)})
    findings.table("Figs. 17 and 18", "P99 to the first token over S-LoRA's at 92% of its capacity", rows)
    findings.claim(
        "Fig. 17",
        "P99 lower by 60, 61, 59% with 7, 13, 30 billion parameters (80 GB)",
        "Chameleon "
        + ", ".join(f"{1 - float(row[QUEUES]):.0%}" for row in rows if row["GiB"] == 80)
        + "; our default "
        + ", ".join(f"{1 - float(row[DEFAULT]):.0%}" for row in rows if row["GiB"] == 80),
        verdict(*(float(row[QUEUES]) < 0.9 for row in rows if row["GiB"] == 80)),
        "the times are assumed in proportion to the weights",
    )
    findings.claim(
        "Fig. 18",
        "the gain grows with memory: 1.4, 1.6, 1.9 times the throughput with 24, 48, 80 GB (7B)",
        "P99: Chameleon " + ", ".join(f"{1 - float(row[QUEUES]):.0%}" for row in rows if row["model"] == "7B"),
        OTHER,
        "throughput at an objective is read from Fig. 10 alone; absolute rates need the A100",
    )
