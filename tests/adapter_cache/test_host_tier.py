"""Adapters in the memory of the host, between their files and a GPU; here the device is the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from shapeshift.adapter_cache.lora.segmented import TorchLora
from shapeshift.adapter_cache.memory import loader
from shapeshift.adapter_cache.memory.adapter_table import Adapter
from shapeshift.adapter_cache.memory.cache import AdapterCache
from shapeshift.adapter_cache.memory.host_tier import HostTier
from shapeshift.adapter_cache.memory.loader import load_weights
from shapeshift.adapter_cache.memory.placement import SharedMemory
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.adapter_cache.settings import EVICTION_RULES, HOST_TIERS
from shapeshift.errors import EngineError
from shapeshift.fused_decode.engine.blocks import BlockPool

BYTES = 4


class Loads:
    """A loader with a host tier, and the names of the adapters whose files were read."""

    def __init__(self, elements: int, eviction: str = "lru") -> None:
        self.read: list[str] = []
        self.fails: set[str] = set()
        self.hits = 0
        self.limit = elements * BYTES
        self.host = HostTier(self.limit, EVICTION_RULES[eviction], self._hit)
        self._ended = threading.Event()
        self.error: Exception | None = None
        self._loader = loader.Loader(self._on_loaded, self._fill, host=self.host)

    def load(self, name: str, elements: int) -> Exception | None:
        """Load an adapter to a place of its own, check what it holds, and return why that failed."""
        target = torch.zeros(elements)
        self.load_to(target, name)
        if self.error is None:
            assert (target == ord(name)).all(), "the weights of another adapter"
        assert self.host.used <= self.limit
        return self.error

    def load_to(self, target: torch.Tensor, name: str) -> None:
        """Load an adapter of the size of `target`."""
        self._ended.clear()
        self._loader.submit(record(name, len(target)), target)
        assert self._ended.wait(120)

    def close(self) -> None:
        self._loader.close()

    def _fill(self, target: torch.Tensor, adapter: Adapter, *, pause: Callable[[], None]) -> None:
        self.read.append(adapter.name)
        target.fill_(ord(adapter.name))
        if adapter.name in self.fails:
            raise EngineError("gone")

    def _on_loaded(self, one: Adapter, error: Exception | None, seconds: float) -> None:
        self.error = error
        self._ended.set()

    def _hit(self) -> None:
        self.hits += 1


def record(name: str, elements: int) -> Adapter:
    # The loader is faked: only the name and the size matter.
    source: object = None
    return Adapter(AdapterInfo(name, 8, elements * BYTES), name, "", source, torch.zeros(0), elements)  # type: ignore[arg-type]


@pytest.fixture
def loads() -> Iterator[Loads]:
    made = Loads(elements=100)
    yield made
    made.close()


def test_what_returns_is_not_read_again(loads: Loads) -> None:
    for name in "abab":
        assert loads.load(name, 40) is None
    assert loads.read == ["a", "b"] and loads.hits == 2 and loads.host.used == 80 * BYTES


def test_the_least_used_go_and_the_bound_holds(loads: Loads) -> None:
    for name in "abac":
        assert loads.load(name, 40) is None
    assert loads.host.names == ["a", "c"], "b was used before a"
    assert loads.load("b", 40) is None and loads.read == ["a", "b", "c", "b"]


def test_one_that_is_too_large_is_loaded_and_evicts_none(loads: Loads) -> None:
    loads.load("a", 40)
    assert loads.load("x", 101) is None
    assert loads.host.names == ["a"] and loads.read == ["a", "x"]


def test_without_room_every_load_reads_its_file() -> None:
    made = Loads(elements=0)
    for _ in range(2):
        assert made.load("a", 8) is None
    made.close()
    assert made.read == ["a", "a"] and made.host.used == made.hits == 0


def test_a_load_that_fails_leaves_no_image(loads: Loads) -> None:
    loads.fails.add("a")
    assert isinstance(loads.load("a", 40), EngineError)
    assert loads.host.names == [] and loads.host.used == 0
    loads.fails.clear()
    assert loads.load("a", 40) is None and loads.read == ["a", "a"]


def test_the_rule_of_the_cache_decides() -> None:
    made = Loads(elements=100, eviction="lfu")
    for name in "aabc":
        made.load(name, 40)
    made.close()
    assert made.host.names == ["a", "c"], "a was loaded twice, so b goes, though it was used later"


def test_a_cache_counts_the_loads_that_it_serves() -> None:
    # As the service opens it on a GPU.
    hosts: list[Any] = []

    def open_host(*inputs: Any) -> Any:
        hosts.append(HOST_TIERS["cuda"](64, *inputs))
        return hosts[0]

    made = AdapterCache(
        SharedMemory(torch.zeros(512), BlockPool(1), 256, text_blocks=1),
        rule=EVICTION_RULES["gdsf"],
        load=partial(load_weights, write=TorchLora().store),
        on_change=lambda: None,
        on_failure=lambda one, error: None,
        open_host=open_host,
    )
    made.close()
    hosts[0].reserve("a", torch.zeros(16))
    assert hosts[0].get("a") is not None and hosts[0].get("b") is None
    assert made.metrics.host_loads.value == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_a_round_trip(device: str) -> None:
    """Two adapters take turns in one place of the device, while the tier has both: page-locked where that is a GPU."""
    elements = 1 << 16
    made, target = Loads(elements=3 * elements), torch.zeros(elements, device=device)
    for name in "ababba":
        # A load waits for what was launched before it, and what is launched after it has its weights.
        target.fill_(-1)
        before = target.clone()
        made.load_to(target, name)
        assert made.error is None
        assert (target == ord(name)).all() and (before == -1).all()
    made.close()
    assert made.read == ["a", "b"] and made.hits == 4
    for name in "ab":
        image = made.host.get(name)
        assert image is not None and image.is_pinned() == target.is_cuda and (image == ord(name)).all()
