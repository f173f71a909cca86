"""Flover: its Table I and Figs. 4 to 7, by the simulated decode loop.

A request of 512 tokens takes 5.8 s alone (Fig. 5), and an iteration of 32 rows 8% longer than one of a row (Fig. 4c).
FasterTransformer's concurrent instances are assumed to take turns: its Fig. 4a has two requests take twice the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.papers.findings import Findings, verdict
from shapeshift.simulate.fused_decode import DecodeMachine, SimulationResult, run
from shapeshift.workloads.trace import Trace

TOKENS, REQUESTS, REQUEST_S = 512, 32, 5.8
_SLOWER = 0.08 / (REQUESTS - 1)
_STEP_S = REQUEST_S / TOKENS
MACHINE = DecodeMachine(slots=REQUESTS, base_s=_STEP_S * (1 - _SLOWER), row_s=_STEP_S * _SLOWER)
INSTANCES = replace(MACHINE, batching="instances")
INTERVAL_S = 0.5
_FIG_5 = {
    20: (None, 91.3, 11.2),
    50: (616, 81.8, 11.1),
    100: (None, None, 10.2),
    150: (None, None, 9.3),
    200: (None, None, 9.1),
    300: (None, None, 7.9),
    400: (None, None, 7.1),
    750: (2239, 23.2, 4.5),
    1000: (2621, 20.0, 4.2),
    2000: (5483, 9.3, 2.1),
    3000: (7738, 6.7, 1.3),
    4000: (8902, 5.7, 1.3),
    5000: (10694, 4.8, 1.1),
}
"""By mean gap in ms: iterations, overlap in percent and speed-up, where the paper's text has them."""
_DRAWS = 50


def measure(findings: Findings, seed: int) -> None:
    """All of them."""
    draws = max(1, round(_DRAWS * findings.scale))
    _launches(findings)
    _intervals(findings)
    _poisson(findings, draws, seed)
    _shuffle(findings, draws, seed)
    _windows(findings)


def _trace(at_s: NDArray[np.float64], tokens: int | NDArray[np.int64] = TOKENS) -> Trace:
    """Requests whose prompt takes no time."""
    count = len(at_s)
    return Trace(at_s, np.ones(count, np.int64), np.broadcast_to(np.int64(tokens), count))


def _span_s(result: SimulationResult, trace: Trace) -> float:
    """From the first arrival to the last token."""
    return float((trace.at_s + result.last_s).max() - trace.at_s[0])


def _launches(findings: Findings) -> None:
    """Table I."""
    trace = _trace(np.zeros(REQUESTS))
    fused, instances = run(MACHINE, trace), run(INSTANCES, trace)
    each = {"fused": fused.launches / TOKENS, "instances": instances.launches / TOKENS}
    findings.claim(
        "Table I",
        "32 requests at once: 1 launch, FasterTransformer 32",
        f"{each['fused']:.0f} and {each['instances']:.0f} launches",
        verdict(each["fused"] == 1, each["instances"] == REQUESTS),
    )


def _intervals(findings: Findings) -> None:
    """Fig. 4."""
    rows = []
    for count in (1, 2, 4, 8, 16, 32):
        trace = _trace(np.arange(count) * INTERVAL_S)
        fused, instances = run(MACHINE, trace), run(INSTANCES, trace)
        spans = {"fused, s": _span_s(fused, trace), "instances, s": _span_s(instances, trace)}
        rows.append(
            {
                "requests": count,
                **spans,
                "times": spans["instances, s"] / spans["fused, s"],
                "fused, latency over one alone": float(fused.last_s.mean()) / REQUEST_S,
                "instances": float(instances.last_s.mean()) / REQUEST_S,
                "tokens/s": count * TOKENS / spans["fused, s"],
                "instances, tokens/s": count * TOKENS / spans["instances, s"],
            }
        )
    findings.table("Fig. 4", f"a request every {INTERVAL_S:g} s", rows)
    last, two = rows[-1], rows[1]
    longer = [rows[place]["fused, latency over one alone"] - 1 for place in (3, -1)]
    findings.claim(
        "Fig. 4a",
        "faster by 1.8 times with 2 requests, 11 (GPT-J) to 16.7 (Llama 65B) with 32",
        f"{two['times']:.1f} and {last['times']:.1f} times",
        verdict(two["times"] > 1.5, last["times"] > 11),
        "instances that take turns; the paper's slow each other down further, with tensor parallelism most",
    )
    findings.claim(
        "Fig. 4b, c",
        "throughput grows, latency by 3% at 8 and 8% at 32; FasterTransformer's does not",
        f"{last['tokens/s'] / rows[0]['tokens/s']:.1f} times the tokens/s at 32, latency "
        f"{longer[0]:.1%} and {longer[1]:.1%} longer; "
        f"instances {last['instances, tokens/s'] / rows[0]['tokens/s']:.1f} times",
        verdict(
            last["tokens/s"] > 3 * rows[0]["tokens/s"],
            last["instances, tokens/s"] < 1.1 * rows[0]["instances, tokens/s"],
            longer[1] < 0.08,
        ),
        "the 8% are put in",
    )


def _poisson(findings: Findings, draws: int, seed: int) -> None:
    """Fig. 5."""
    rows: list[Mapping[str, float | str]] = []
    inside: list[bool] = []
    for gap_ms, (iterations, overlap, speed) in _FIG_5.items():
        counts, speeds = [], []
        for draw in range(draws):
            gaps = np.random.default_rng([seed, draw]).exponential(gap_ms / 1e3, REQUESTS)
            trace = _trace(np.cumsum(gaps) - gaps[0])
            fused = run(MACHINE, trace)
            # Those of a request from first start to last end, as if the loop never paused.
            counts.append(_span_s(fused, trace) / _STEP_S)
            speeds.append(_span_s(run(INSTANCES, trace), trace) / _span_s(fused, trace))
        row: dict[str, float | str] = {"gap ms": gap_ms, "iterations": float(np.mean(counts))}
        row |= {"least": min(counts), "most": max(counts), "paper": iterations or ""}
        row |= {"overlap": TOKENS / float(np.mean(counts)), "paper's": overlap or "", "times": float(np.mean(speeds))}
        rows.append(row | {"paper's times": speed})
        if iterations:
            inside.append(min(counts) <= iterations <= max(counts))
    findings.table("Fig. 5", f"32 requests, Poisson, {draws} draws", rows)
    by_gap = {row["gap ms"]: row for row in rows}
    findings.claim(
        "Fig. 5",
        "616, 2,239, 10,694 iterations at mean gaps of 50, 750, 5,000 ms",
        ", ".join(f"{by_gap[gap]['iterations']:.0f}" for gap in (50, 750, 5000))
        + f" in the mean; the paper's within our range at {sum(inside)} of {len(inside)} gaps",
        verdict(*inside),
        "the paper's are one draw, always a low one",
    )
    times = [float(by_gap[gap]["times"]) for gap in (20, 750, 5000)]
    findings.claim(
        "Fig. 5",
        "11.2 times as fast at 20 ms, 4.5 at 750, 1.1 at 5,000",
        ", ".join(f"{value:.1f}" for value in times),
        verdict(times[0] > 11, abs(times[1] / 4.5 - 1) < 1 / 3, abs(times[2] / 1.1 - 1) < 1 / 3),
        "instances that take turns are slower than the paper's at small gaps, which overlap there",
    )


def _shuffle(findings: Findings, draws: int, seed: int) -> None:
    """Fig. 6: contiguous slots with and without Algorithm 3."""
    rows = []
    for most in (256, 512, 1024):
        spans: dict[str, list[float]] = {"contiguous": [], "compacted": [], "instances": []}
        computed: dict[str, int] = dict.fromkeys(spans, 0)
        moves = 0
        for draw in range(draws):
            tokens = np.random.default_rng([seed, draw]).integers(128, most + 1, REQUESTS)
            trace = _trace(np.zeros(REQUESTS), tokens)
            for name in spans:
                machine = INSTANCES if name == "instances" else replace(MACHINE, rows=name)
                result = run(machine, trace)
                spans[name].append(_span_s(result, trace))
                computed[name] += result.rows
                moves += result.moves
        means = {name: float(np.mean(of)) for name, of in spans.items()}
        rows.append(
            {
                "upper bound": most,
                **{f"{name}, s": value for name, value in means.items()},
                "time saved": 1 - means["compacted"] / means["contiguous"],
                "rows saved": 1 - computed["compacted"] / computed["contiguous"],
                "moves a run": moves / draws,
            }
        )
    findings.table("Fig. 6", f"32 requests at once, lengths from 128, {draws} draws", rows)
    findings.claim(
        "Fig. 6",
        "the shuffle takes 20% off the time; with it 23.4 times FasterTransformer's speed",
        ", ".join(f"{row['time saved']:.1%}" for row in rows)
        + " off the time, "
        + ", ".join(f"{row['rows saved']:.0%}" for row in rows)
        + f" of the rows; {rows[-1]['instances, s'] / rows[-1]['compacted, s']:.0f} times",
        verdict(all(row["time saved"] > 0.1 for row in rows), rows[-1]["instances, s"] > 10 * rows[-1]["compacted, s"]),
        "32 rows take 8% longer than one (Fig. 4c), so that saved rows cannot save 20%",
    )


def _windows(findings: Findings) -> None:
    """Fig. 7: progress of dynamic batching, and of both others."""
    trace = _trace(np.arange(REQUESTS) * INTERVAL_S)
    systems = {
        "fused": MACHINE,
        "instances": INSTANCES,
        **{f"window of {s:g} s": replace(MACHINE, batching="window", window_s=s) for s in (2.0, 4.0, 8.0, 16.0)},
    }
    rows = {}
    for name, machine in systems.items():
        result = run(machine, trace)
        upto = np.cumsum(result.tokens)
        halves = {
            f"{share:.0%} of tokens, s": float(result.ended_s[np.searchsorted(upto, share * upto[-1])])
            for share in (0.25, 0.5, 1.0)
        }
        rows[name] = {**halves, "mean latency, s": float(result.last_s.mean())}
    findings.table("Fig. 7", "32 requests, one every 0.5 s", [{"system": name, **row} for name, row in rows.items()])
    delayed = {n: r["mean latency, s"] / rows["fused"]["mean latency, s"] - 1 for n, r in rows.items() if n != "fused"}
    findings.claim(
        "Fig. 7",
        "dynamic batching delays the requests of a window by 300%",
        ", ".join(f"{name} {delay:+.0%}" for name, delay in delayed.items()),
        verdict(*(delay > 1 for name, delay in delayed.items() if name.startswith("window"))),
        "a next batch waits for the one before",
    )
