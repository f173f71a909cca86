"""The record of one adapter, and the table of all adapters that requests may name, resident or not."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from shapeshift.adapter_cache.lora.batch import ALIGNMENT, lay_out
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.registry.peft import PeftAdapter
from shapeshift.errors import EngineError, OverloadedError, ShapeshiftError

ABSENT, LOADING, READY = range(3)
_PAUSE_S, _MOST_PAUSE_S = 1.0, 30.0
_HEAD_BYTES = 4
_numbers = itertools.count()


@dataclass(eq=False)
class Adapter:
    """One version of a registered adapter; new weights under the same name make a new record.

    info      its name is unique; label: the name that requests use
    number    its value in `StepBatch.adapters`
    relative  places of its factors in its own memory of `elements`, see `lora.batch.lay_out`; places: in the buffer
    head      its own memory of each of `source.head`, whose tensors are f32; start: of its memory in the buffer
    verified  whether its files have the hash `sha256`
    failure   why its last load failed; until `retry_at`, monotonic seconds, no other load is started
    failed_reads  loads in a row that failed since a file could not be read
    load      when its last load began and ended; monotonic, in seconds
    on_demand whether a request caused the load and no request has used it since
    users     running requests that use it
    uses, last, base  see `policy.eviction.EvictEntry`

    `Catalogue` creates the record. `Preloader.pin` sets `pinned`, on the thread of the catalogue. On the loader's
    thread, `load_weights` sets `verified` and `AdapterCache` sets `load`, and `state` to READY. On the generating
    thread, `AdapterCache` sets `state` to LOADING, calls `fail`, and writes `on_demand`, `users`, `uses`, `last` and
    `base`; `Placement` writes `places` and sets `state` to ABSENT.
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
    failure: Exception | None = None
    retry_at: float = math.inf
    failed_reads: int = 0
    state: int = ABSENT
    places: torch.Tensor | None = None
    head: tuple[slice, ...] = ()
    start: int = 0
    load: tuple[float, float] = (0.0, 0.0)
    on_demand: bool = False
    users: int = 0
    uses: int = 0
    last: float = 0.0
    base: float = 0.0

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def error(self) -> Exception | None:
        """Why it cannot be loaded now."""
        return self.failure if time.monotonic() < self.retry_at else None

    def fail(self, error: Exception) -> None:
        """A load has failed. An OverloadedError passes: the load may be tried again at once, then after pauses."""
        self.failure = error
        if isinstance(error, OverloadedError):
            self.retry_at = time.monotonic() + min(self.failed_reads * _PAUSE_S, _MOST_PAUSE_S)
            self.failed_reads += 1

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted."""
        return self.state == READY and not self.users


def make_adapter(label: str, sha256: str, source: PeftAdapter, element_bytes: int) -> Adapter:
    """The record of a checked adapter."""
    relative, elements = lay_out(source.base.adaptable, source.factors)
    head = []
    for tensor in source.head:
        end = elements + math.prod(tensor.shape) * _HEAD_BYTES // element_bytes
        head.append(slice(elements, end))
        elements = -(-end // ALIGNMENT) * ALIGNMENT
    number = next(_numbers)
    info = AdapterInfo(f"{label}@{sha256[:12]}.{number}", source.rank, elements * element_bytes)
    return Adapter(info, label, sha256, source, relative, elements, number=number, head=tuple(head))


def unavailable(text: str, error: Exception) -> ShapeshiftError:
    """The error of a request whose adapter cannot be loaded because of `error`."""
    kind = OverloadedError if isinstance(error, OverloadedError) else EngineError
    return kind(f"{text}: {error}")


class AdapterTable:
    """Adapters by name and by number, and how many requests wait for each. Any thread, unless stated otherwise.

    by_name  all adapters
    waiting  number of waiting requests by adapter; the adapter whose first request has waited longest is first
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Adapter] = {}
        self.waiting: dict[str, int] = {}
        self._by_number: dict[int, Adapter] = {}
        self._withdrawn: dict[str, Adapter] = {}
        self._holds: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Adapter:
        return self.by_name[name]

    def numbered(self, number: int) -> Adapter:
        """The adapter with this number."""
        return self._by_number[number]

    def all(self) -> list[Adapter]:
        """All adapters."""
        with self._lock:
            return list(self.by_name.values())

    def add(self, adapter: Adapter) -> None:
        """Requests may name `adapter` from now on."""
        with self._lock:
            self._by_number[adapter.number] = adapter
            self.by_name[adapter.name] = adapter

    def withdraw(self, adapter: Adapter) -> None:
        """No further request will name `adapter`."""
        with self._lock:
            self._withdrawn[adapter.name] = adapter

    def hold(self, adapter: Adapter) -> bool:
        """Keep `adapter` in the table until `unhold`, for one request; False where it has left the table."""
        with self._lock:
            if adapter.name not in self.by_name:
                return False
            self._holds[adapter.name] += 1
            return True

    def unhold(self, name: str) -> None:
        """Take one `hold` back."""
        with self._lock:
            self._holds[name] -= 1
            if not self._holds[name]:
                del self._holds[name]

    def queued(self, name: str) -> None:
        """Count one more waiting request."""
        with self._lock:
            self.waiting[name] = self.waiting.get(name, 0) + 1

    def unqueued(self, name: str) -> None:
        """Count one waiting request less."""
        with self._lock:
            self.waiting[name] -= 1
            if not self.waiting[name]:
                del self.waiting[name]

    def waiting_adapters(self) -> list[Adapter]:
        """The adapters that requests wait for, in the order of `waiting`."""
        with self._lock:
            return [self.by_name[name] for name in self.waiting]

    def pop_unused(self) -> list[Adapter]:
        """The withdrawn adapters that no request names, uses or waits for and that are not loading; generating thread.

        They leave the table, and the caller evicts them.
        """
        with self._lock:
            unused = [adapter for adapter in self._withdrawn.values() if self._is_unused(adapter)]
            for adapter in unused:
                del self._withdrawn[adapter.name], self._by_number[adapter.number], self.by_name[adapter.name]
        return unused

    def _is_unused(self, adapter: Adapter) -> bool:
        is_named = adapter.name in self._holds or adapter.name in self.waiting
        return not is_named and not adapter.users and adapter.state != LOADING
