"""The soak: steady load without faults, and what each process holds meanwhile."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from bench.drill import gates
from bench.drill.faults.scene import Scene
from bench.drill.leftovers import Footprint
from bench.drill.outcomes import LOST, RIGHT, WRONG

_SAMPLE_S = 5.0
_WARM_UP = 0.3


def soak(scene: Scene, rates: Mapping[str, float], minutes: float, say: Callable[[str], None]) -> Iterator[str]:
    """Run it and yield a line for each gate that it misses."""
    traffic = scene.traffic
    first = len(traffic.outcomes)
    samples: dict[str, list[Footprint]] = defaultdict(list)
    began = time.monotonic()
    traffic.resume(rates)
    while (passed_s := time.monotonic() - began) < 60.0 * minutes:
        time.sleep(_SAMPLE_S)
        if passed_s >= _WARM_UP * 60.0 * minutes:
            for name, footprint in scene.site.footprints().items():
                samples[name].append(footprint)
    traffic.pause()
    counts = Counter(one.kind for one in traffic.outcomes[first:])
    say(f"soak of {minutes:g} minutes: {dict(counts)}")
    say(f"  {'process':24}{'RSS MB first':>13}{'last':>8}{'fds':>10}{'threads':>12}")
    for name, found in samples.items():
        one, last = found[0], found[-1]
        fds, threads = f"{one.fds} {last.fds}", f"{one.threads} {last.threads}"
        say(f"  {name:24}{one.rss_mb:13.1f}{last.rss_mb:8.1f}{fds:>10}{threads:>12}")
    yield from gates.not_flat(samples)
    yield from (f"soak: {counts[kind]} {kind}" for kind in (WRONG, LOST) if counts[kind])
    if not counts[RIGHT]:
        yield "soak: no right answer"
