"""The seeded order of the faults."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bench.drill.faults import clients, control, files, resources, signals
from bench.drill.faults.scene import Fault

_SOURCES = (signals, clients, control, files, resources)


def every_fault(quick: bool) -> list[Fault]:
    """All faults, or those of a quick run."""
    return [fault for source in _SOURCES for fault in source.faults() if fault.quick or not quick]


def rounds(faults: list[Fault], rng: np.random.Generator) -> Iterator[list[Fault]]:
    """The faults again and again, each time in another order."""
    while True:
        yield [faults[index] for index in rng.permutation(len(faults))]
