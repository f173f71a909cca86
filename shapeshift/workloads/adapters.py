"""Many adapters whose ranks are requested by a power law (Chameleon, section 5.1)."""

from __future__ import annotations

import numpy as np

RANKS = (8, 16, 32, 64, 128)
POWER = 1.0
"""The k-th smallest rank is requested in proportion to k to the minus POWER; adapters of a rank are equally likely."""


def ranks(count: int) -> dict[str, int]:
    """`count` adapters by name, equally many of each rank."""
    return {f"r{rank}-{number:02}": rank for rank in RANKS for number in range(count // len(RANKS))}


def names(count: int, requests: int, rng: np.random.Generator) -> list[str]:
    """The adapters, of `count`, that so many requests name."""
    shares = (np.arange(len(RANKS)) + 1.0) ** -POWER
    chosen = rng.choice(len(RANKS), requests, p=shares / shares.sum())
    return [f"r{RANKS[at]}-{rng.integers(count // len(RANKS)):02}" for at in chosen]
