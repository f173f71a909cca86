"""Adapters in the memory of the host, for a GPU: what was evicted there is copied back, not read from its file again.

The second tier of Chameleon, section 4.1: disk, host, device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shapeshift.adapter_cache.policy.eviction import EvictEntry, RankedEviction


@dataclass
class _Image:
    """The memory of one adapter as it is on the device; uses, last, base: see `policy.eviction.EvictEntry`."""

    memory: torch.Tensor
    uses: int
    last: float
    base: float


class HostTier:
    """Images of adapters, at most `limit` bytes together. The loader's thread alone uses it.

    Which of them go is decided by the rule of the device's cache, over their loads. on_hit() is called for each load
    that an image serves.
    """

    def __init__(self, limit: int, rule: RankedEviction, on_hit: Callable[[], None]) -> None:
        self.used = 0
        self._limit = limit
        self._rule = rule
        self._on_hit = on_hit
        self._clock = 0.0
        self._images: dict[str, _Image] = {}

    @property
    def names(self) -> list[str]:
        """The adapters that it holds."""
        return list(self._images)

    def get(self, name: str) -> torch.Tensor | None:
        """The image of adapter `name`; None where there is none."""
        image = self._images.get(name)
        if image is None:
            return None
        image.uses, image.last, image.base = image.uses + 1, time.monotonic(), self._clock
        self._on_hit()
        return image.memory

    def reserve(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """Memory like `target` for an image to be filled, page-locked where `target` is on a GPU.

        It is kept if there is room for it beside others or in place of others; if not, it serves one load.
        """
        memory = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
        if self._make_room(memory.nbytes):
            self._images[name] = _Image(memory, 1, time.monotonic(), self._clock)
            self.used += memory.nbytes
        return memory

    def drop(self, name: str) -> None:
        """Forget the image of adapter `name`, if there is one."""
        image = self._images.pop(name, None)
        if image is not None:
            self.used -= image.memory.nbytes

    def _make_room(self, size: int) -> bool:
        """Evict until `size` bytes are free; False, and nothing is evicted, where they never can be."""
        if size > self._limit:
            return False
        entries = [
            EvictEntry(name, image.memory.nbytes, image.uses, image.last, base=image.base)
            for name, image in self._images.items()
        ]
        evicted, self._clock = self._rule.choose(entries, self.used + size - self._limit, self._clock)
        for name in evicted or ():
            self.drop(name)
        return evicted is not None
