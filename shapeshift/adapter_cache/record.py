"""One registered adapter: what it is, where it lies, and who uses it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch

from shapeshift.adapter_cache.interfaces import AdapterInfo
from shapeshift.adapter_cache.layout import places
from shapeshift.adapter_cache.peft import PeftAdapter
from shapeshift.fused_decode.architecture import Architecture

ABSENT, LOADING, READY = range(3)
_numbers = itertools.count()


@dataclass(eq=False)
class Adapter:
    """An adapter as it was when it was registered; registered anew with other weights it is another one.

    info      under a name that no other one ever bears; label: what requests ask for
    number    in `StepBatch.adapters`
    relative  where its factors lie in its own memory of `elements`, see `layout.places`; places: in the pool
    verified  whether its files are known to be those of `sha256`
    error     why it cannot be loaded
    fresh     loaded because a request asked for it, and not used since
    users, waiting  requests that run with it and that wait for it
    uses, last, base  what eviction goes by, see `evict.EvictEntry`
    """

    info: AdapterInfo
    label: str
    sha256: str
    source: PeftAdapter
    relative: torch.Tensor
    elements: int
    pinned: bool = False
    number: int = field(default_factory=lambda: next(_numbers))
    verified: bool = False
    error: Exception | None = None
    state: int = ABSENT
    places: torch.Tensor | None = None
    fresh: bool = False
    users: int = 0
    waiting: int = 0
    uses: int = 0
    last: float = 0.0
    base: float = 0.0

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def idle(self) -> bool:
        """Whether its memory may be taken."""
        return self.state == READY and not self.users


def make(label: str, sha256: str, source: PeftAdapter, base: Architecture, width: int, pinned: bool = False) -> Adapter:
    """The record of a checked adapter; width: bytes of an element of the pool."""
    relative, elements = places(base, source.factors)
    number = next(_numbers)
    info = AdapterInfo(f"{label}@{sha256[:12]}.{number}", source.rank, elements * width)
    return Adapter(info, label, sha256, source, relative, elements, pinned, number)
