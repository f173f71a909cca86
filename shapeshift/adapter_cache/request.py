"""A request that may name an adapter."""

from __future__ import annotations

from typing import Any

from shapeshift.adapter_cache.memory.adapter_table import Adapter
from shapeshift.fused_decode.request import Request


class AdapterRequest(Request):
    """A request that may name an adapter, see `interfaces.SizedRequest`; `LoraFront` sets what it adds.

    adapter, label, rank: the adapter's unique name, the name that clients use, and its rank; None, "", 0 without one.
    """

    __slots__ = ("adapter", "label", "predicted_tokens", "rank")

    def __init__(self, *fields: Any, **named: Any) -> None:
        super().__init__(*fields, **named)
        self.predicted_tokens = 0
        self.use(None)

    def use(self, adapter: Adapter | None) -> None:
        """Generate with `adapter`, or with the base model."""
        self.adapter: str | None = None if adapter is None else adapter.name
        self.label = "" if adapter is None else adapter.label
        self.rank = 0 if adapter is None else adapter.info.rank
        if adapter is not None:
            self.adapter_id = adapter.number

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def max_new_tokens(self) -> int:
        return self.limit
