"""What a fault works on, and what is said of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.drill.site import Site
from bench.drill.traffic import Traffic


@dataclass(frozen=True)
class Scene:
    """A served site under load. carried: right answers a second of each front; say: writes a line to the log.

    hang, clock: the files that `hanging_backend` and `fake_clock.c` read. clients: how many vanish.
    """

    site: Site
    traffic: Traffic
    carried: Mapping[str, float]
    rng: np.random.Generator
    say: Callable[[str], None]
    hang: Path
    clock: Path
    clients: int


@dataclass(frozen=True)
class Fault:
    """One fault and its gates.

    inject     brings it about, returns when it is over, and says from which instant on requests should become whole:
               True from its beginning, False from its end; a reason where it cannot be brought about here
    within_s   by when they must be; `restarts`: beside the time in which the server starts
    holders    fronts whose requests a killed process holds; it takes them until `held_s` after the beginning
    quick      whether a quick run has it
    """

    name: str
    inject: Callable[[Scene], bool | str]
    within_s: float
    restarts: bool = False
    holders: tuple[str, ...] = ()
    held_s: float = 1.0
    quick: bool = False
