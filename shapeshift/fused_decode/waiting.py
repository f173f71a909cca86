"""How the kernels' threads wait for one another: some tens of microseconds awake, then asleep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SPINS = 3000
_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def arrange(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Make OpenMP's threads sleep soon when they wait; to be called before torch is imported.

    By default they stay awake for milliseconds, and where another program wants a core, the thread that holds up
    all others is the one that does not get it: the rate falls to a third or less instead of by a third.

    A choice that the environment holds already is left alone. Returns whether there is now one that torch sees.
    """
    if any(name in environment for name in _CHOICES):
        return True
    if "torch" in sys.modules:
        return False
    environment["GOMP_SPINCOUNT"] = str(SPINS)
    return True


def passing(work: Callable[[], T]) -> T:
    """What `work` returns, done on a thread that ends with it.

    Every thread that computes keeps a pool of OpenMP's threads for as long as it lives. With more of them than cores
    they all go to sleep at once when they wait, also those of the thread that decodes: a step then takes a third more.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="passing") as executor:
        return executor.submit(work).result()
