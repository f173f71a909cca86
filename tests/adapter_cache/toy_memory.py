"""A memory whose loads end when the test says so, and requests for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(eq=False)
class FakeRequest:
    """See `adapter_cache.policy.scheduling.SizedRequest`."""

    adapter: str | None = None
    prompt_tokens: int = 10
    predicted_tokens: int = 10
    max_new_tokens: int = 10
    rank: int = 8
    arrived: float = 0.0
    generated: int = 0
    rows: int = 1
    slo_class: str | None = None

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt_tokens + self.max_new_tokens)


@dataclass
class ToyMemory:
    """Adapters of `sizes` tokens each and KV cache in one memory of `total_tokens`."""

    total_tokens: int = 10_000
    sizes: dict[str, int] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    loading: list[str] = field(default_factory=list)
    users: dict[str, int] = field(default_factory=dict)
    waiting: dict[str | None, int] = field(default_factory=dict)
    held_tokens: int = 0

    @property
    def free_tokens(self) -> int:
        used = sum(self.sizes[name] for name in self.loaded if self.users.get(name))
        return self.total_tokens - self.held_tokens - used - sum(self.sizes[name] for name in self.loading)

    def resident(self, adapter: str | None) -> bool:
        return adapter is None or adapter in self.loaded

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        if not self.resident(adapter):
            return False
        taken = self.sizes[adapter] if adapter is not None and not self.users.get(adapter) else 0
        if tokens > self.free_tokens - taken:
            return False
        if adapter is None:
            return True
        self.users[adapter] = self.users.get(adapter, 0) + 1
        return True

    def release(self, adapter: str | None) -> None:
        if adapter is not None:
            assert self.users[adapter] > 0
            self.users[adapter] -= 1

    def queued(self, adapter: str | None) -> None:
        self.waiting[adapter] = self.waiting.get(adapter, 0) + 1

    def unqueued(self, adapter: str | None) -> None:
        assert self.waiting[adapter] > 0
        self.waiting[adapter] -= 1

    def start_load(self, adapter: str, reserved_tokens: int = 0, spared: Collection[str] = ()) -> bool:
        if adapter in self.loaded or adapter in self.loading:
            return True
        if self.sizes[adapter] + reserved_tokens > self.free_tokens:
            return False
        idle = sorted(name for name in self.loaded if not self.users.get(name))
        if self.sizes[adapter] > self.free_tokens - sum(self.sizes[name] for name in idle if name in spared):
            return False
        for name in idle:
            resident = sum(self.sizes[one] for one in idle if one in self.loaded)
            if self.sizes[adapter] + reserved_tokens <= self.free_tokens - resident:
                break
            if name not in spared:
                self.loaded.remove(name)
        self.loading.append(adapter)
        return True

    def end_load(self) -> None:
        """End the oldest load."""
        if self.loading:
            self.loaded.add(self.loading.pop(0))

    def check(self, running: list[FakeRequest], waiting: int) -> None:
        """Running and waiting requests are counted correctly."""
        for name in self.sizes:
            assert self.users.get(name, 0) == sum(one.adapter == name for one in running)
        assert sum(self.waiting.values()) == waiting
