"""The line between the policies of this technique and what holds tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AdapterInfo:
    """What is known of an adapter without its weights. bytes: what they take in the pool."""

    name: str
    rank: int
    bytes: int


class SizedRequest(Protocol):
    """What an admission knows of a request. None of it changes while the request waits.

    adapter           name; None: the base model
    rank              of the adapter; 0 without one
    prompt_tokens     of the prompt
    max_new_tokens    most tokens of the answer
    predicted_tokens  of the answer, as foretold when the request came
    generated         tokens of the answer so far; grows while the request runs
    arrived           monotonic, in seconds
    tokens            that it may come to: prompt and longest answer
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
    def tokens(self) -> int: ...


class Memory(Protocol):
    """The adapters in the pool, as an admission sees them. Any thread may call `queued` and `unqueued`.

    Called with the admission's lock held: no call may block for long, or call the admission. What is free falls only
    by `want` and by requests that get their slots, both on the generating thread, so that what an admission has
    counted on stays; the others may prefetch between two iterations. Once a load has ended, the loop is woken.

    free_tokens   tokens of KV cache that may still be promised, were all idle adapters given up; a request that
                  has been admitted counts once it has its slot
    total_tokens  of the whole pool
    """

    @property
    def free_tokens(self) -> int: ...
    @property
    def total_tokens(self) -> int: ...

    def need(self, adapter: str | None) -> int:
        """Bytes that must be loaded for it now; 0 where it is resident, or none."""
        ...

    def resident(self, adapter: str | None) -> bool:
        """Whether it is loaded and ready to compute with; true of none."""
        ...

    def acquire(self, adapter: str | None, tokens: int = 0) -> bool:
        """Count a running user; False, and nothing counted, where it is not resident or no slot would be left for it.

        tokens: of cache that must be free beside it. Asked in the `admit` that returns the request.
        """
        ...

    def release(self, adapter: str | None) -> None:
        """One running user less."""
        ...

    def queued(self, adapter: str | None) -> None:
        """A request for it waits: it may be prefetched, and is evicted last."""
        ...

    def unqueued(self, adapter: str | None) -> None:
        """That request waits no longer."""
        ...

    def want(self, adapter: str, beside: int = 0) -> bool:
        """Begin to load it, on another thread, or go on; True also where it is resident.

        False where the pool cannot hold it now together with `beside` more tokens of cache.
        """
        ...
