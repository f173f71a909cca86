"""LoRA over the linears of a base model: the layout of an adapter's factors in memory, and one hook for each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.interfaces import (
    DOWN,
    GATE_UP,
    LINEARS,
    OUTPUT,
    QKV,
    Groups,
    LinearDelta,
    LowRank,
    StepBatch,
)
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.tensor_layout import linears, qkv_order
from shapeshift.settings import require

ALIGNMENT = 32
"""Elements; every factor starts at a multiple of it."""
PARTS, FIELDS = 3, 4
OFFSET, RANK = 0, 1
"""Fields of `LowRank.places` that hold the offset and the rank of a factor."""
# Names of `weights.linears`, by linear.
_NAMES = {QKV: "qkv", OUTPUT: "output", GATE_UP: "gate_up", DOWN: "down"}.values()


# The layout of one adapter.


@dataclass(frozen=True)
class Part:
    """A part of a linear: it takes `inputs` numbers and gives `outputs` of the linear's outputs, from `first` on."""

    inputs: int
    first: int
    outputs: int


@dataclass(frozen=True)
class Factor:
    """One low-rank term, for one part of a linear: A [rank, inputs] and B [outputs, rank].

    scale  multiplies B
    a, b   names of the tensors in the adapter's file
    magnitude  name of the tensor [outputs] with the lengths of the merged weight's rows (DoRA); empty: they are free
    """

    layer: int
    linear: int
    part: int
    rank: int
    scale: float
    a: str
    b: str
    magnitude: str = ""

    @property
    def module(self) -> str:
        """The linear's name in the checkpoint."""
        return module_of(self.a)


def module_of(a: str) -> str:
    """The name of the linear whose factor A is the tensor `a` of an adapter."""
    return a.removeprefix("base_model.model.").removesuffix(".lora_A.weight")


@dataclass(frozen=True)
class Adaptable:
    """What of a base model adapters may change: the linears of its layers, which are alike, and a classifier's head.

    paths    what adapters may write before the number of a layer, the checkpoint's own name first
    targets  linear and part, by the name of the module in a layer
    head     shapes of the head's tensors, by name, in order; none: the model has no head
    unused   modules beside the layers that the model does not compute: whatever an adapter has for them
    """

    layers: int
    paths: tuple[str, ...]
    targets: Mapping[str, tuple[int, int]]
    parts: Mapping[tuple[int, int], Part]
    head: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadTensor:
    """A tensor of the base model's head as an adapter has it: its own one or the model's, and a low-rank term.

    index, shape  among the tensors of the head
    saved  name of its own one in the adapter's file; empty: it has none
    a, b, scale  of the term, B times A; empty: there is none
    """

    index: int
    shape: tuple[int, ...]
    saved: str = ""
    a: str = ""
    b: str = ""
    scale: float = 1.0


def adaptable_of_decoder(a: Architecture) -> Adaptable:
    """Those of a model that generates. Raises InvalidInputError as `require_plain_layers`."""
    require_plain_layers(a)
    return Adaptable(a.layers, (a.tensors.layers,), targets(a), linear_parts(a))


def require_plain_layers(a: Architecture) -> None:
    """Raise InvalidInputError for a base model whose layers have several MLPs, or are not alike."""
    if a.experts is not None:
        allowed = f"0 in a base model of adapters: {a.family} is a mixture of experts"
        raise InvalidInputError(a.experts.key, a.experts.count, allowed)
    require(not a.varied, "model_type", a.family, "a base model of adapters whose layers are alike")


def targets(a: Architecture) -> dict[str, tuple[int, int]]:
    """The linears of a layer that adapters may change, by their names in a checkpoint: linear and part."""
    stacked = linears(a)
    parts = [stacked[linear].names for linear in _NAMES]
    return {name: (linear, part) for linear, names in enumerate(parts) for part, name in enumerate(names)}


def linear_parts(a: Architecture) -> dict[tuple[int, int], Part]:
    """The parts of a layer's linears, by linear and part: each is one tensor of a checkpoint."""
    parts, stacked = {}, linears(a)
    for linear, name in enumerate(_NAMES):
        first = 0
        for part, outputs in enumerate(stacked[name].outputs):
            parts[linear, part] = Part(stacked[name].inputs, first, outputs)
            first += outputs
    return parts


def row_order(a: Architecture, layer: int, linear: int, part: int) -> torch.Tensor | None:
    """The outputs of a part as a checkpoint, and so an adapter, has them, INT64 [outputs], in the order of the runtime.

    None where that is the checkpoint's order.
    """
    order = qkv_order(a, layer) if linear == QKV else None
    if order is None:
        return None
    part_rows = linear_parts(a)[QKV, part]
    return order[part_rows.first : part_rows.first + part_rows.outputs] - part_rows.first


def lay_out(base: Adaptable, factors: Sequence[Factor]) -> tuple[torch.Tensor, int]:
    """The places of an adapter's factors relative to its first element, and the elements that all of them take.

    The places are INT64 [layers, LINEARS, PARTS, FIELDS], see `fused_decode.interfaces.LowRank`. B is transposed.
    Behind the B of a factor with a magnitude are 2 times `outputs` elements, see `OutputScales`.
    """
    places = torch.zeros(base.layers, LINEARS, PARTS, FIELDS, dtype=torch.int64)
    end = 0
    for factor in factors:
        part = base.parts[factor.linear, factor.part]
        row = torch.tensor([end, factor.rank, part.first, part.outputs])
        places[factor.layer, factor.linear, factor.part] = row
        taken = factor.rank * (part.inputs + part.outputs) + (2 * part.outputs if factor.magnitude else 0)
        end += -(-taken // ALIGNMENT) * ALIGNMENT
    return places, end


def shifted(relative: torch.Tensor, start: int) -> torch.Tensor:
    """The places of an adapter that starts at element `start`."""
    places = relative.clone()
    places[..., OFFSET] += start
    return places


# The adapters of one batch.


@dataclass(frozen=True)
class BatchAdapters:
    """The adapters of a batch.

    memory  flat; holds the factors
    places  INT64 [adapters, layers, LINEARS, PARTS, FIELDS], see `fused_decode.interfaces.LowRank`
    """

    memory: torch.Tensor
    places: torch.Tensor


class LoraKernels(Protocol):
    """One implementation of the LoRA arithmetic. fits_graphs: whether CUDA graphs can hold it, see `GraphLoraHook`."""

    name: str
    fits_graphs: bool

    def prepare(self, adapters: BatchAdapters) -> PreparedAdapters:
        """The work that is done once for a set of adapters; valid until the set changes or one of them moves."""
        ...

    def store(self, target: torch.Tensor, source: torch.Tensor, transposed: bool, scale: float) -> bool:
        """Write `source` [rows, columns], or its transpose, times `scale` into `target`; whether all is finite."""
        ...


class PreparedAdapters(Protocol):
    """The adapters of a batch, ready to be added."""

    @property
    def arrays(self) -> BatchAdapters | None:
        """The adapters, if the model may compute their terms itself; None if it must call `add`."""
        ...

    def add(self, groups: Groups, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """See `fused_decode.interfaces.LinearDelta.add`; group g belongs to the g-th adapter."""
        ...


class OutputScales:
    """What DoRA does to the outputs of the base model, which other kernels than those of `LoraKernels` compute.

    With the merged weight W + BA and its magnitudes m, an output is g W x + g B A x + bias, where g is m divided by the
    length of its row of W + BA. B is stored times g. Behind it are g - 1 and (g - 1) bias: the terms of W x.
    """

    def __init__(self, adapters: BatchAdapters, having: Sequence[int]) -> None:
        """having: the indices of the adapters with magnitudes."""
        self._adapters = adapters
        self._having = np.array(having)
        self._terms: dict[tuple[int, int], torch.Tensor] = {}

    def rows(self, adapters: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens to scale, of those with these adapters, and which of the adapters with magnitudes each has."""
        tokens = np.flatnonzero(np.isin(adapters, self._having))
        device = self._adapters.memory.device
        which = np.searchsorted(self._having, adapters[tokens])
        return torch.from_numpy(tokens).to(device), torch.from_numpy(which).to(device)

    def apply(
        self, rows: tuple[torch.Tensor, torch.Tensor], layer: int, linear: int, inputs: int, outputs: torch.Tensor
    ) -> None:
        """Scale the `outputs` [tokens, width] of a linear over `inputs` numbers, in place."""
        tokens, which = rows
        terms = self._terms.get((layer, linear))
        if terms is None:
            terms = self._terms[layer, linear] = self._gathered(layer, linear, inputs, outputs.shape[1])
        before = outputs.index_select(0, tokens).float()
        more, of_bias = terms.index_select(1, which)
        outputs.index_copy_(0, tokens, torch.addcmul(before - of_bias, more, before).to(outputs.dtype))

    def _gathered(self, layer: int, linear: int, inputs: int, outputs: int) -> torch.Tensor:
        """g - 1 and its product with the bias: [2, adapters with magnitudes, outputs], 0 where there is no term."""
        memory = self._adapters.memory
        terms = torch.zeros(2, len(self._having), outputs, device=memory.device)
        for index, adapter in enumerate(self._having):
            for offset, rank, first, width in self._adapters.places[adapter, layer, linear].tolist():
                if rank:
                    start = offset + rank * (inputs + width)
                    terms[:, index, first : first + width] = memory[start : start + 2 * width].view(2, width)
        return terms


class LoraDelta:
    """See `fused_decode.interfaces.LinearDelta`: prepared adapters for the tokens of one step."""

    def __init__(
        self,
        prepared: PreparedAdapters,
        adapters: npt.NDArray[np.int64],
        count: int,
        scales: OutputScales | None = None,
    ) -> None:
        """adapters: INT64 [tokens], the index of each token's adapter, -1 for none; count: number of adapters."""
        self._prepared = prepared
        self._adapters = adapters
        self._count = count
        self._scales = scales
        self._groups = group_tokens(adapters, count)
        if scales is not None:
            self._scaled_rows = scales.rows(adapters)

    def add(self, layer: int, linear: int, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if self._scales is not None:
            self._scales.apply(self._scaled_rows, layer, linear, inputs.shape[1], outputs)
        self._prepared.add(self._groups, layer, linear, inputs, outputs)

    def subset(self, tokens: torch.Tensor) -> LoraDelta | None:
        adapters = self._adapters[tokens.cpu().numpy()]
        if np.array_equal(adapters, self._adapters):
            return self
        return LoraDelta(self._prepared, adapters, self._count, self._scales) if (adapters >= 0).any() else None

    def low_rank(self, last: torch.Tensor) -> LowRank | None:
        arrays = self._prepared.arrays
        if arrays is None or self._scales is not None:
            return None
        adapters = self._adapters[last.numpy()]
        unchanged = np.array_equal(adapters, self._adapters)
        last_groups = self._groups if unchanged else group_tokens(adapters, self._count)
        return LowRank(arrays.memory, arrays.places, self._groups, last_groups)


def group_tokens(adapters: npt.NDArray[np.int64], count: int) -> Groups:
    """Group tokens by adapter: INT64 [tokens], -1 for none, of adapters 0 to count - 1."""
    order = np.argsort(adapters, kind="stable")
    firsts = np.searchsorted(adapters[order], np.arange(count + 1))
    order, firsts = order[firsts[0] :], firsts - firsts[0]
    return Groups(len(adapters), torch.from_numpy(firsts.astype(np.int32)), torch.from_numpy(order.astype(np.int32)))


class LoraHook:
    """See `fused_decode.interfaces.LinearHook`.

    places_of(numbers): the places of adapters by number, and a version that changes when one of them moves.
    has_magnitudes(number): whether the adapter is a DoRA.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        places_of: Callable[[list[int]], tuple[list[torch.Tensor], int]],
        kernels: LoraKernels,
        has_magnitudes: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._memory = memory
        self._places_of = places_of
        self._has_magnitudes = has_magnitudes
        self._scales: OutputScales | None = None
        self._kernels = kernels
        self._key: tuple[list[int], int] | None = None
        self._prepared: PreparedAdapters | None = None

    def linear_delta(self, batch: StepBatch) -> LinearDelta:
        assert batch.adapters is not None
        adapters = np.repeat(batch.adapters.numpy(), batch.lengths.numpy())
        present = np.unique(adapters)
        present = present[present >= 0]
        numbers = present.tolist()
        places, version = self._places_of(numbers)
        if self._prepared is None or self._key != (numbers, version):
            self._key = numbers, version
            held = BatchAdapters(self._memory, torch.stack(places))
            having = [index for index, number in enumerate(numbers) if self._has_magnitudes(number)]
            self._prepared = self._kernels.prepare(held)
            self._scales = OutputScales(held, having) if having else None
        indices = np.where(adapters < 0, -1, np.searchsorted(present, adapters))
        return LoraDelta(self._prepared, indices, len(numbers), self._scales)
