"""What the adapters of a batch add to its linears: tokens grouped by adapter, and the form they are computed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.adapter_cache.layout import RANK
from shapeshift.fused_decode.adjust import Adjustment, Groups, LowRank
from shapeshift.fused_decode.step import StepBatch

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Loaded:
    """The adapters of a batch.

    memory  what they lie in, flat
    places  INT64 [adapters, layers, linears, parts, fields], see `adjust.LowRank`
    """

    memory: torch.Tensor
    places: torch.Tensor


class Form(Protocol):
    """A way to compute terms."""

    name: str

    def prepare(self, loaded: Loaded) -> Prepared:
        """What can be done once for a set of adapters; used as long as the batch has that set and none of it moves."""
        ...


class Prepared(Protocol):
    """A set of adapters, ready to be added."""

    @property
    def plain(self) -> Loaded | None:
        """The adapters, where the model may compute their terms by itself; None where it must call `add`."""
        ...

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """See `adjust.Adjustment.add`; group g is of the g-th adapter."""
        ...


class GroupedTerms:
    """See `adjust.Adjustment`: a prepared set of adapters for the tokens of one step."""

    def __init__(self, prepared: Prepared, adapters: Numbers, count: int) -> None:
        """adapters: INT64 [tokens], each one's place in the set, -1 for none; count: adapters in the set."""
        self._prepared = prepared
        self._adapters = adapters
        self._count = count
        self._groups = group(adapters, count)

    def add(self, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        self._prepared.add(self._groups, layer, linear, inputs, outputs)

    def among(self, tokens: torch.Tensor) -> GroupedTerms | None:
        kept = self._adapters[tokens.cpu().numpy()]
        if np.array_equal(kept, self._adapters):
            return self
        return GroupedTerms(self._prepared, kept, self._count) if (kept >= 0).any() else None

    def low_rank(self, last: torch.Tensor) -> LowRank | None:
        plain = self._prepared.plain
        if plain is None:
            return None
        kept = self._adapters[last.numpy()]
        groups = self._groups if np.array_equal(kept, self._adapters) else group(kept, self._count)
        return LowRank(plain.memory, plain.places, self._groups, groups)


def group(adapters: Numbers, count: int) -> Groups:
    """Tokens by adapter: INT64 [tokens], -1 for none, of adapters 0 to count-1."""
    order = np.argsort(adapters, kind="stable")
    firsts = np.searchsorted(adapters[order], np.arange(count + 1))
    order, firsts = order[firsts[0] :], firsts - firsts[0]
    return Groups(len(adapters), torch.from_numpy(firsts.astype(np.int32)), torch.from_numpy(order.astype(np.int32)))


class Terms:
    """See `adjust.Adjuster`.

    find(numbers) gives the places of the adapters with these numbers, and a version that changes when one of them
    moves. `stacked` is used for sums of ranks up to `stacked_ranks`, `segmented` beyond.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        find: Callable[[list[int]], tuple[list[torch.Tensor], int]],
        segmented: Form,
        stacked: Form,
        stacked_ranks: int,
    ) -> None:
        self._memory = memory
        self._find = find
        self._segmented, self._stacked = segmented, stacked
        self._stacked_ranks = stacked_ranks
        self._key: tuple[list[int], int] | None = None
        self._prepared: Prepared | None = None

    def adjustment(self, batch: StepBatch) -> Adjustment:
        assert batch.adapters is not None
        adapters = np.repeat(batch.adapters.numpy(), batch.lengths.numpy())
        present = np.unique(adapters)
        present = present[present >= 0]
        numbers = present.tolist()
        places, version = self._find(numbers)
        if self._prepared is None or self._key != (numbers, version):
            self._key = numbers, version
            self._prepared = self._prepare(places)
        local = np.where(adapters < 0, -1, np.searchsorted(present, adapters))
        return GroupedTerms(self._prepared, local, len(numbers))

    def _prepare(self, places: list[torch.Tensor]) -> Prepared:
        loaded = Loaded(self._memory, torch.stack(places))
        ranks = int(loaded.places[..., RANK].amax(dim=(1, 2, 3)).sum())
        return (self._stacked if ranks <= self._stacked_ranks else self._segmented).prepare(loaded)
