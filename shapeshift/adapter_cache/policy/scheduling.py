"""What a scheduler is given: requests with adapters, and the memory that both share."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from shapeshift.serving.bounds import OTHERS, QueuedRequest


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter without its weights. bytes: memory that the weights take once they are loaded."""

    name: str
    rank: int
    bytes: int


class SizedRequest(QueuedRequest, Protocol):
    """A request as a scheduler sees it. Only `generated` changes after the request is submitted.

    adapter           name; None: the base model
    rank              of the adapter; 0 without one
    prompt_tokens     length of the prompt
    predicted_tokens  predicted length of the answer
    generated         tokens of the answer so far
    arrived           monotonic seconds
    rows              slots that it takes: one, or one for each beam
    tokens            upper bound of prompt and answer together, of all its rows
    """

    @property
    def adapter(self) -> str | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
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


@dataclass(frozen=True)
class SchedulerInputs:
    """What every scheduler is built from.

    queue_requests  most requests that may wait
    adapter_tokens  memory of an adapter's weights, in tokens of KV cache; 0 for None
    block_tokens    tokens of a block of KV cache; a request takes whole blocks
    classes         see `bounds.SloClasses`
    """

    memory: AdapterMemory
    queue_requests: int
    adapter_tokens: Callable[[str | None], int]
    block_tokens: int = 1
    clock: Callable[[], float] = time.monotonic
    classes: Sequence[str] = (OTHERS,)
