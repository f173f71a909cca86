"""Terms of a whole batch at once: all adapters' factors stacked to one pair, and a mask of whose ranks are whose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shapeshift.adapter_cache.layout import PARTS
from shapeshift.adapter_cache.segmented import factors
from shapeshift.adapter_cache.terms import Loaded
from shapeshift.fused_decode.adjust import Groups


@dataclass(frozen=True)
class Pair:
    """The stacked factors of a part: A [inputs, ranks], B [ranks, outputs], the adapter of each rank, its columns."""

    a: torch.Tensor
    b: torch.Tensor
    owners: torch.Tensor
    columns: slice


class StackedTerms:
    """See `terms.Prepared`. Copies of the factors, made when a linear is first asked for."""

    plain = None

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._pairs: dict[tuple[int, int], list[Pair]] = {}
        self._owners: tuple[Groups, torch.Tensor] | None = None

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if (layer, linear) not in self._pairs:
            self._pairs[layer, linear] = self._stack(layer, linear, inputs.shape[1])
        if not self._pairs[layer, linear]:
            return
        owners = self._owners_of(groups, inputs.device)
        for pair in self._pairs[layer, linear]:
            # Others' numbers may be anything, and are not to be heard.
            mixed = torch.where(owners == pair.owners, inputs @ pair.a, 0.0)
            outputs[:, pair.columns] += mixed @ pair.b

    def _stack(self, layer: int, linear: int, inputs: int) -> list[Pair]:
        found: dict[int, list[tuple[int, torch.Tensor, torch.Tensor, slice]]] = {}
        for adapter in range(len(self._loaded.places)):
            for a, b, columns in factors(self._loaded, adapter, layer, linear, inputs):
                found.setdefault(columns.start, []).append((adapter, a, b, columns))
        assert len(found) <= PARTS
        return [_pair(terms) for terms in found.values()]

    def _owners_of(self, groups: Groups, device: torch.device) -> torch.Tensor:
        """INT64 [tokens, 1]: the adapter of each token, -1 for none."""
        if self._owners is None or self._owners[0] is not groups:
            owners = torch.full((groups.tokens, 1), -1)
            for adapter, tokens in enumerate(groups.each()):
                owners[tokens] = adapter
            self._owners = groups, owners.to(device)
        return self._owners[1]


def _pair(terms: list[tuple[int, torch.Tensor, torch.Tensor, slice]]) -> Pair:
    a = torch.cat([a for _, a, _, _ in terms]).T.contiguous()
    b = torch.cat([b for _, _, b, _ in terms])
    owners = torch.cat([torch.full((len(a),), adapter) for adapter, a, _, _ in terms])
    return Pair(a, b, owners.to(a.device), terms[0][3])


class Stacked:
    """See `terms.Form`."""

    name = "stacked"

    def prepare(self, loaded: Loaded) -> StackedTerms:
        return StackedTerms(loaded)
