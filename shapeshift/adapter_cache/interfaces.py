"""The data and protocols shared by the pure policies and the code that holds tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter without its weights. bytes: memory that the weights take once they are loaded."""

    name: str
    rank: int
    bytes: int


class SizedRequest(Protocol):
    """A request as a scheduler sees it. Only `generated` changes after the request is submitted.

    adapter           name; None: the base model
    rank              of the adapter; 0 without one
    prompt_tokens     length of the prompt
    max_new_tokens    upper bound of the answer's length
    predicted_tokens  predicted length of the answer
    generated         tokens of the answer so far
    arrived           monotonic seconds
    rows              slots that it takes: one, or one for each beam
    tokens            upper bound of prompt and answer together, of all its rows
    slo_class         its class; None: none
    """

    @property
    def adapter(self) -> str | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def predicted_tokens(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def arrived(self) -> float: ...
    @property
    def rows(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def slo_class(self) -> str | None: ...


class AdapterMemory(Protocol):
    """The memory that adapters and requests share, as a scheduler sees it.

    Any thread may call `queued` and `unqueued`; only the generating thread calls the rest. The scheduler calls all of
    them with its lock held, so no method may block for long or call the scheduler. Within an iteration, only
    `start_load` and requests that get their slots reduce the free memory. The end of a load wakes the decode loop.

    free_tokens   tokens of KV cache that can still be granted if all idle adapters are evicted; an admitted request
                  counts as soon as it holds its slot
    total_tokens  tokens of KV cache in all slots
    """

    @property
    def free_tokens(self) -> int: ...
    @property
    def total_tokens(self) -> int: ...

    def resident(self, adapter: str | None) -> bool:
        """Whether the adapter is loaded and ready; True for None."""
        ...

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        """Count one more running request of `adapter`.

        tokens: KV cache that must stay free beside it. Returns False, and changes nothing, if the adapter is not
        resident or too little memory would be left. Call it in the `admit` that returns the request.
        """
        ...

    def release(self, adapter: str | None) -> None:
        """Count one running request less."""
        ...

    def queued(self, adapter: str | None) -> None:
        """Count one more waiting request: the adapter may be preloaded, and is evicted last."""
        ...

    def unqueued(self, adapter: str | None) -> None:
        """Count one waiting request less."""
        ...

    def start_load(self, adapter: str, reserved_tokens: int = 0, spared: Collection[str] = ()) -> bool:
        """Start to load `adapter` on another thread unless it is loading or resident.

        spared: adapters that are not evicted for it, though idle. Returns False if the memory cannot hold it beside
        those and `reserved_tokens` more tokens of KV cache.
        """
        ...


@runtime_checkable
class SizeQueueStats(Protocol):
    """What a scheduler with size queues exports."""

    max_queues: int
    squashes: int
    bypasses: int

    def queue_lengths(self) -> Sequence[int]:
        """Waiting requests by queue."""
        ...

    def quotas(self) -> Sequence[int]:
        """Tokens that the requests of each queue may hold."""
        ...


@dataclass(frozen=True)
class EvictEntry:
    """A resident adapter as an eviction rule sees it.

    id      a name; or a number, if all ids are numbers
    size    bytes
    freq    number of uses
    last    time of the last use
    rc      running requests that use it
    queued  whether a request waits for it
    pinned  whether it must stay
    base    clock of the `gdsf` rule at the last use
    """

    id: str
    size: float
    freq: float
    last: float
    rc: int = 0
    queued: bool = False
    pinned: bool = False
    base: float = 0.0


class EvictionRule(Protocol):
    """Chooses which resident adapters are evicted."""

    def choose(
        self, entries: Sequence[EvictEntry], need: float, clock: float = 0.0, now: float | None = None
    ) -> tuple[list[str] | None, float]:
        """The ids to evict, in order, until `need` bytes are free, and the new clock of the `gdsf` rule."""
        ...


@dataclass(frozen=True)
class PredictionInput:
    """What is known of a request before it runs.

    embedding  of the prompt, [n]; None if it was not computed
    truth      actual length of the answer; known in experiments only
    text       the prompt
    """

    adapter: str | None
    prompt_tokens: int
    max_new_tokens: int
    embedding: Floats | None = None
    truth: int | None = None
    text: bytes = b""


class LengthPredictor(Protocol):
    """Predicts the length of answers. Any thread may call it."""

    def predict(self, request: PredictionInput) -> int:
        """Predicted tokens of the answer, 1 to `max_new_tokens`; never blocks."""
        ...

    def predict_later(self, request: PredictionInput, then: Callable[[int], None]) -> None:
        """Call `then` with the prediction: at once, or soon on another thread where it takes time. Never blocks."""
        then(self.predict(request))

    def learn(self, request: PredictionInput, generated: int) -> None:
        """Report that the answer had `generated` tokens."""
        ...

    def close(self) -> None:
        """End the threads, if there are any; whoever waits for a prediction gets one."""
        return


class Prefetcher(Protocol):
    """Predicts which adapters are requested next. Not safe for concurrent calls."""

    def record(self, adapter: str, now: float) -> None:
        """Report a request for `adapter` at `now` seconds."""
        ...

    def plan(
        self, adapters: Sequence[AdapterInfo], resident: Collection[str], free_bytes: int, now: float
    ) -> list[str]:
        """The adapters to load into `free_bytes` of unused memory, likeliest first."""
        ...
