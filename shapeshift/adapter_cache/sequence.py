"""A request that may name an adapter."""

from __future__ import annotations

from typing import Any

from shapeshift.adapter_cache.record import Adapter
from shapeshift.fused_decode.sequence import Sequence


class AdapterSequence(Sequence):
    """See `interfaces.SizedRequest`. `predicted_tokens` is set before it is submitted."""

    __slots__ = ("adapter", "label", "predicted_tokens", "rank")

    def __init__(self, chosen: Adapter | None, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.adapter: str | None = None if chosen is None else chosen.name
        self.label = "" if chosen is None else chosen.label
        self.rank = 0 if chosen is None else chosen.info.rank
        self.predicted_tokens = self.limit
        if chosen is not None:
            self.adapter_id = chosen.number

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def max_new_tokens(self) -> int:
        return self.limit
