"""One rank's part of a model: its weights, its part of the cache, the linears that meet those of the others, and what
a child does with them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

from shapeshift.errors import ShapeshiftError
from shapeshift.fused_decode.interfaces import StepBatch
from shapeshift.fused_decode.model import native_operations
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.assembly import LinearMakers, assemble, linear_makers
from shapeshift.fused_decode.model.cpu_runtime import DTYPES, DecodeModel, in_temporary_thread
from shapeshift.fused_decode.model.graphs.verify import kernels_for
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.network import Linear, Network
from shapeshift.fused_decode.model.torch_operations import PlainLinear, TorchOperations
from shapeshift.fused_decode.ranks.collective import RankGroup
from shapeshift.fused_decode.ranks.shards import RankWeights
from shapeshift.serving.model_args import Log

_SOURCES, _TARGETS = "copied_blocks", "copies"
_warn = logging.getLogger(__name__).warning


@dataclass(frozen=True)
class RankSpec:
    """What a rank loads; `device` is its own, threads are those of one rank, the rest as in `DecodeModel.load`.

    meeting: the file over which the ranks find one another, see `RankGroup.connect`
    """

    rank: int
    ranks: int
    folder: str
    precision: str
    device: str
    slots: int
    max_length: int
    blocks: int
    kv_precision: str
    threads: int
    native: bool
    kernel_cache: str
    meeting: str = ""

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RankSpec:
        return cls(**json.loads(text))


class MemberModel(DecodeModel):
    """A rank's part as a model. All ranks call `forward` with equal batches; rank 0 gets the logits, on the CPU.

    What the others get means nothing.
    """

    def _run(self, batch: StepBatch) -> torch.Tensor:
        tokens = batch.tokens.to(self.cache.device)
        return super()._run(dataclasses.replace(batch, tokens=tokens)).cpu()


def load_member(spec: RankSpec, group: RankGroup, log: Log = _warn) -> MemberModel:
    """The part of the checkpoint that `spec` describes. Raises InvalidInputError as `DecodeModel.load` does."""
    folder, dtype, on_cpu = Path(spec.folder), DTYPES[spec.precision], spec.device == "cpu"
    if on_cpu:
        torch.set_num_threads(spec.threads)
    else:
        torch.cuda.set_device(spec.device)
    whole = Architecture.read(folder)
    files = RankWeights(folder, whole, spec.rank, spec.ranks)

    def build() -> MemberModel:
        cache = KeyValueCache(
            files.architecture,
            spec.slots,
            spec.max_length,
            dtype,
            blocks=spec.blocks,
            kv_precision=spec.kv_precision,
            device=spec.device,
        )
        compiled = native_operations.load(Path(spec.kernel_cache), log) if spec.native and on_cpu else None
        if on_cpu:
            make = linear_makers(spec.precision, 0, dtype, compiled is not None)
        else:
            make = LinearMakers(PlainLinear, PlainLinear, dtype)
        network = joined(assemble(files.architecture, files, cache, dtype, make), group)
        device = torch.device(spec.device)
        operations = compiled or TorchOperations(device, kernels_for(network, device, log))
        return MemberModel(network, operations, cache)

    return in_temporary_thread(build)


def joined(network: Network, group: RankGroup) -> Network:
    """The network of a rank, with the sums over the ranks in its layers and all tokens of the vocabulary in the end."""
    layers = [
        dataclasses.replace(layer, output=Summed(layer.output, group), down=layer.down and Summed(layer.down, group))
        for layer in network.layers
    ]
    head = Gathered(network.head, group, network.architecture.vocab_size)
    return dataclasses.replace(network, layers=layers, head=head)


class Summed:
    """A linear whose inputs the ranks divide: the sum of what each one's part gives."""

    def __init__(self, linear: Linear, group: RankGroup) -> None:
        self._linear, self._group = linear, group

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._group.sum(self._linear(rows))


class Gathered:
    """A linear whose outputs the ranks divide: on rank 0, the first `outputs` of all."""

    def __init__(self, linear: Linear, group: RankGroup, outputs: int) -> None:
        self._linear, self._group, self._outputs = linear, group, outputs

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self._linear(rows))[:, : self._outputs]


def run(receive: Callable[[], bytes], send: Callable[[bytes], None]) -> int:
    """What a child does: load its part, meet the other ranks, compute each batch that rank 0 sends.

    Returns only where the model cannot be loaded. An error of a step ends the process, which rank 0 notices. Sends its
    state when the part is loaded, and when the ranks have met.
    """
    spec = RankSpec.from_json(receive())
    group = RankGroup(spec.rank, spec.ranks, spec.device)
    try:
        model = load_member(spec, group)
    except (ShapeshiftError, OSError, RuntimeError, MemoryError) as error:
        send(_state(f"{type(error).__name__}: {error}"))
        return 1
    send(_state())
    group.connect(Path(spec.meeting))
    send(_state())
    while True:
        batch, sources, targets = from_bytes(receive())
        model.copy_blocks(sources, targets)
        model.forward(batch)


def _state(error: str = "") -> bytes:
    return json.dumps({"error": error}).encode()


# What rank 0 tells the others before each step: the blocks to copy, and the batch.


def to_bytes(batch: StepBatch, sources: Sequence[int], targets: Sequence[int]) -> bytes:
    """The tensors of `batch` that are not None, in safetensors' format.

    sources, targets: of the blocks to copy before the step, see `Runtime.copy_blocks`.
    """
    fields = ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))
    # Two fields may be one tensor, which the functions for torch refuse to write.
    arrays = {name: tensor.contiguous().numpy() for name, tensor in fields if isinstance(tensor, torch.Tensor)}
    if sources:
        arrays |= {_SOURCES: np.array(sources, np.int32), _TARGETS: np.array(targets, np.int32)}
    return safetensors.numpy.save(arrays)


def from_bytes(content: bytes) -> tuple[StepBatch, list[int], list[int]]:
    """The batch, and the blocks that are copied and their copies: what `to_bytes` was given."""
    tensors: dict[str, Any] = safetensors.torch.load(content)
    sources, targets = (tensors.pop(name, None) for name in (_SOURCES, _TARGETS))
    copied = [[] if places is None else places.tolist() for places in (sources, targets)]
    return StepBatch(**tensors), copied[0], copied[1]
