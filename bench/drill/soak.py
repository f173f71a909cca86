"""The soak: steady load without faults, and what each process holds meanwhile."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.drill.faults.scene import Scene
from bench.drill.outcomes import LOST, RIGHT, WRONG
from bench.drill.site import Footprint

_SAMPLE_S = 5.0
_WARM_UP = 0.3
_THROUGHOUT = 0.9
_TEXTS = 20
_FLAT = 0.02
"""RSS may grow by this share."""


def soak(
    scene: Scene, rates: Mapping[str, float], minutes: float, say: Callable[[str], None], data: dict[str, Any]
) -> Iterator[str]:
    """Run it, yield a line for each gate that it misses, and write the samples of each process into `data`."""
    traffic = scene.traffic
    first = len(traffic.outcomes)
    samples: dict[str, list[tuple[float, Footprint]]] = defaultdict(list)
    began = time.monotonic()
    traffic.resume(rates)
    while (passed_s := time.monotonic() - began) < 60.0 * minutes:
        time.sleep(_SAMPLE_S)
        for name, footprint in scene.site.footprints().items():
            samples[name].append((passed_s, footprint))
    traffic.pause()
    outcomes = traffic.outcomes[first:]
    counts = Counter(one.kind for one in outcomes)
    say(f"soak of {minutes:g} minutes: {dict(counts)}")
    errors = Counter(f"{one.front}: {one.kind}: {one.text[:200]}" for one in outcomes if one.kind != RIGHT)
    for text, number in errors.most_common(_TEXTS):
        say(f"  {number} x {text}")
    say(f"  {'process':24}{'RSS MB first':>13}{'last':>8}{'fds':>10}{'threads':>12}")
    after_s = _WARM_UP * 60.0 * minutes
    warm = {name: [one for at_s, one in taken if at_s >= after_s] for name, taken in samples.items()}
    most = max(map(len, warm.values()))
    # Others began or ended meanwhile, such as a worker that was replaced and a process that is just being started.
    throughout = {name: taken for name, taken in warm.items() if len(taken) > _THROUGHOUT * most}
    for name, taken in throughout.items():
        one, last = taken[0], taken[-1]
        fds, threads = f"{one.fds} {last.fds}", f"{one.threads} {last.threads}"
        say(f"  {name:24}{one.rss_mb:13.1f}{last.rss_mb:8.1f}{fds:>10}{threads:>12}")
    data["samples"] = {
        name: [[round(at_s), round(one.rss_mb, 1), one.fds, one.threads] for at_s, one in taken]
        for name, taken in samples.items()
    }
    yield from not_flat(throughout)
    yield from (f"soak: {counts[kind]} {kind}" for kind in (WRONG, LOST) if counts[kind])
    if not counts[RIGHT]:
        yield "soak: no right answer"


def not_flat(samples: Mapping[str, Sequence[Footprint]]) -> Iterator[str]:
    """A line for each process of a soak that grows. samples: by process, in order, those after the warm-up.

    The medians of the first and the last quarter are compared.
    """
    for process, footprints in samples.items():
        quarter = max(1, len(footprints) // 4)
        first, last = footprints[:quarter], footprints[-quarter:]
        for what, share in (("rss_mb", _FLAT), ("threads", 0.0), ("fds", 0.0)):
            was, now = (float(np.median([getattr(one, what) for one in part])) for part in (first, last))
            if now > was * (1 + share):
                yield f"{process}: {what} grew from {was:g} to {now:g}"
