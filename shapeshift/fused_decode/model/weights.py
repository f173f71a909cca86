"""The tensors of a checkpoint, of safetensors or GGUF: every name and shape is checked before any tensor is read."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.engines.checkpoint import INDEX, SINGLE, shard_names, weight_files
from shapeshift.engines.gguf import tensors as gguf_tensors
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import GGUF, Architecture
from shapeshift.fused_decode.settings import (
    COMPUTED_BYTES,
    HEAD_BITS,
    QUANTISED,
    WEIGHT_BITS,
    computed,
    group_of,
)
from shapeshift.settings import Choices, require

_QUANTISED = "shapeshift.fused_decode.model.quantised"
UNPACKED: Choices[Any] = Choices(
    "quantization_config", {"words": f"{_QUANTISED}:unpacked", "blocks": f"{_QUANTISED}:of_blocks"}
)
"""What reads packed linears, see `quantised.unpacked` and `quantised.of_blocks`."""
_DTYPES = ("F32", "F16", "BF16")
_WORD_DTYPE, _WORDS = "I32", (".qweight", ".qzeros", ".g_idx")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stacked:
    """A linear of a layer: the tensors that it is stacked from, and the outputs of each."""

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    biased: bool


def linears(architecture: Architecture) -> dict[str, Stacked]:
    """The linears of a layer."""
    a, names = architecture, architecture.tensors
    three, halves = (a.query_width, a.kv_width, a.kv_width), (a.intermediate, a.intermediate)
    return {
        "qkv": Stacked(names.qkv, three if len(names.qkv) > 1 else (sum(three),), a.hidden, a.qkv_bias),
        "output": Stacked((names.output,), (a.hidden,), a.query_width, a.output_bias),
        "gate_up": Stacked(names.gate_up, halves if len(names.gate_up) > 1 else (a.inner_width,), a.hidden, a.mlp_bias),
        "down": Stacked((names.down,), (a.hidden,), a.intermediate, a.mlp_bias),
    }


def layer_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name within a layer and shape of every tensor of one layer."""
    a, names = architecture, architecture.tensors
    named: dict[str, Shape] = {}
    for one in linears(a).values():
        for name, outputs in zip(one.names, one.outputs, strict=True):
            named[f"{name}.weight"] = (one.inputs, outputs) if names.columns else (outputs, one.inputs)
            if one.biased:
                named[f"{name}.bias"] = (outputs,)
    for name in (names.attention_norm, names.attention_end, names.mlp_norm, names.mlp_end):
        named |= _norm_shapes(a, name) if name else {}
    if a.qk_norm:
        rows = a.qk_norm == "row"
        named[f"{names.query_norm}.weight"] = (a.query_width if rows else a.head_dim,)
        named[f"{names.key_norm}.weight"] = (a.kv_width if rows else a.head_dim,)
    return named


def shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name and shape of every tensor of the model; a tied output head is not listed."""
    a, names = architecture, architecture.tensors
    named: dict[str, Shape] = {f"{names.embedding}.weight": (a.vocab_size, a.hidden)}
    named |= _norm_shapes(a, names.final_norm)
    if names.positions:
        named[f"{names.positions}.weight"] = (a.max_position, a.hidden)
    if not a.tied:
        named[f"{names.head}.weight"] = (a.vocab_size, a.hidden)
    if a.head_bias:
        named[f"{names.head}.bias"] = (a.vocab_size,)
    one = layer_shapes(a)
    return named | {f"{names.layers}.{layer}.{name}": shape for layer in range(a.layers) for name, shape in one.items()}


def stored_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name and shape of every tensor of the files: as `shapes`, with the linears of the layers as they are packed."""
    a, result = architecture, shapes(architecture)
    if a.packing is None or a.packing.method == GGUF:
        return result
    require(not a.tensors.columns, "quantization_config", a.packing.method, f"not with a {a.family}")
    for layer, one in itertools.product(range(a.layers), linears(a).values()):
        for name, outputs in zip(one.names, one.outputs, strict=True):
            module = f"{a.tensors.layers}.{layer}.{name}"
            del result[f"{module}.weight"]
            result |= {f"{module}.{part}": shape for part, shape in a.packing.shapes(outputs, one.inputs).items()}
    return result


def _norm_shapes(a: Architecture, name: str) -> dict[str, Shape]:
    parts = ("weight", "bias") if a.norm == "layer" else ("weight",)
    return {f"{name}.{part}": (a.hidden,) for part in parts}


def qkv_order(architecture: Architecture, layer: int) -> torch.Tensor | None:
    """The outputs of a checkpoint's qkv, INT64 [queries, keys and values], in the order of the runtime: all queries,
    all keys, all values, and each head as `kv_cache.RopeTables` rotates it. None where that is the checkpoint's order.
    """
    a, rope = architecture, architecture.ropes[layer]
    places = torch.arange(a.query_width + 2 * a.kv_width).view(-1, a.head_dim)
    if a.tensors.by_head:
        places = places.view(a.heads, 3, a.head_dim).transpose(0, 1).reshape(-1, a.head_dim)
    order = head_order(a.head_dim, rope.rotated if rope else 0, a.interleaved)
    rotating = a.heads + a.kv_heads
    result = torch.cat([places[:rotating, order], places[rotating:]]).flatten()
    return None if torch.equal(result, torch.arange(len(result))) else result


def head_order(head_dim: int, rotated: int, interleaved: bool) -> torch.Tensor:
    """Places in a checkpoint's head, INT64 [head_dim], in the order in which `kv_cache.RopeTables` rotates them.

    interleaved: the checkpoint rotates elements 2i and 2i + 1 together; otherwise i and i + rotated / 2.
    """
    pairs = torch.arange(rotated).view(-1, 2).T if interleaved else torch.arange(rotated).view(2, -1)
    others = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat([pairs[0], others[0], pairs[1], others[1]])


def weight_bytes(architecture: Architecture, precision: str, group_size: int = 0, ranks: int = 1) -> int:
    """Bytes of the loaded weights, of all ranks together. A tied table counts twice: lookup and product need different
    layouts. The ranks divide the linears; each has the whole table for lookups.

    group_size: see `settings.group_of`.
    """
    a, bits = architecture.share(ranks), WEIGHT_BITS[precision]
    table = a.vocab_size * a.hidden
    sizes = [(sum(linear.outputs), linear.inputs, bits) for linear in linears(a).values()] * a.layers * ranks
    others = ranks * (sum(math.prod(shape) for shape in shapes(a).values()) - (0 if a.tied else table))
    others -= sum(outputs * inputs for outputs, inputs, _ in sizes)
    sizes.append((a.vocab_size, a.hidden, HEAD_BITS if precision in QUANTISED else bits))
    held = sum(outputs * inputs * bits // 8 for outputs, inputs, bits in sizes)
    if precision in QUANTISED:
        packing = a.packing if a.packing is not None and a.packing.bits == bits else None
        # A group has a scale in f32, a zero of one byte, and of GGUF a minimum in f32.
        each = 9 if packing is not None and packing.method == GGUF else 5
        held += sum(
            each * out * -(-inputs // ((packing.group if packing else group_of(bits, inputs, group_size)) or inputs))
            for out, inputs, bits in sizes
        )
    return held + others * COMPUTED_BYTES[computed(precision)]


class WeightFiles:
    """The files of weights of a checkpoint folder, checked against an architecture; tensors are read one by one.

    Raises InvalidInputError for a missing or broken shard, for a tensor that is missing, has another shape or a dtype
    other than F32, F16 and BF16, and for a tensor that the architecture does not have.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._architecture = architecture
        self._shapes = stored_shapes(architecture)
        self._linears = linears(architecture)
        self._folder, self._blocks = folder, gguf_tensors.read_index(folder)
        self._places: dict[str, tuple[Path, str]] = {}
        for name, entry in self._blocks.items():
            self._place(folder / entry.file, name, entry.shape, _DTYPES[0])
        for path in () if self._blocks else _files(folder):
            self._add(path)
        missing = sorted(self._shapes.keys() - self._places.keys())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InvalidInputError(
                "checkpoint", str(folder), f"lacks the tensor {missing[0]}{more}; download it again"
            )

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name`, contiguous, as `dtype`; a copy."""
        return self._stored(name).to(dtype, copy=True).contiguous()

    def linear(self, layer: int, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [outputs, inputs] and bias [outputs], if it has one, of one of `linears`."""
        linear, a = self._linears[name], self._architecture
        if a.packing is not None:
            levels, bias = self.levels(layer, name, dtype)
            return levels.weight().to(dtype), bias
        prefix = f"{a.tensors.layers}.{layer}."
        weights = [self.read(f"{prefix}{part}.weight", dtype) for part in linear.names]
        weight = torch.cat([part.T for part in weights] if a.tensors.columns else weights)
        bias = torch.cat([self.read(f"{prefix}{part}.bias", dtype) for part in linear.names]) if linear.biased else None
        order = qkv_order(a, layer) if name == "qkv" else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return weight.contiguous(), bias

    def levels(self, layer: int, name: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor | None]:
        """As `linear`, of a checkpoint that is packed, in `quantised.Levels`; `dtype` is that of the bias."""
        linear, a = self._linears[name], self._architecture
        assert a.packing is not None, "the linears are plain"
        modules = [f"{a.tensors.layers}.{layer}.{part}" for part in linear.names]
        if a.packing.method == GGUF:
            weight = UNPACKED["blocks"]([self._block(f"{module}.weight") for module in modules])
        else:
            packed = {module: {key: self._stored(f"{module}.{key}") for key in a.packing.parts} for module in modules}
            weight = UNPACKED["words"](packed, a.packing)
        bias = torch.cat([self.read(f"{module}.bias", dtype) for module in modules]) if linear.biased else None
        order = qkv_order(a, layer) if name == "qkv" else None
        return (weight, bias) if order is None else (weight.rows(order), None if bias is None else bias[order])

    def head_levels(self, name: str) -> Any:
        """The weight `name` of an output head in `quantised.Levels`; None where the files hold it otherwise."""
        entry = self._blocks.get(self._places[name][1])
        held = entry is not None and gguf_tensors.LEVELS.get(entry.kind) == HEAD_BITS
        return UNPACKED["blocks"]([self._block(name)]) if held else None

    def _block(self, name: str) -> tuple[str, torch.Tensor]:
        entry = self._blocks[self._places[name][1]]
        return entry.kind, torch.from_numpy(gguf_tensors.blocks(self._folder, entry))

    def _stored(self, name: str) -> torch.Tensor:
        path, stored = self._places[name]
        if self._blocks:
            return torch.from_numpy(gguf_tensors.numbers(self._folder, self._blocks[stored]))
        with safe_open(str(path), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(stored)
        return tensor

    def _add(self, path: Path) -> None:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a mapping
                    piece = file.get_slice(name)
                    self._place(path, name, tuple(piece.get_shape()), piece.get_dtype())
        except (SafetensorError, OSError) as error:
            allowed = f"must be a whole safetensors file ({error}); download it again"
            raise InvalidInputError(path.name, str(path), allowed) from None

    def _place(self, path: Path, name: str, shape: Shape, dtype: str) -> None:
        today = self._known(name)
        self._check(path, today, shape, dtype)
        self._places[today] = path, name

    def _known(self, name: str) -> str:
        """The name that the architecture has for the tensor `name` of a file."""
        names = self._architecture.tensors
        today = dict(names.renamed).get(name, name)
        longer = names.prefix + today
        return longer if today not in self._shapes and longer in self._shapes else today

    def _check(self, path: Path, name: str, shape: Shape, dtype: str) -> None:
        expected = self._shapes.get(name)
        a = self._architecture
        if expected is None:
            require(name.endswith(a.tensors.ignored), name, shape, f"this {a.family} has no such tensor ({path.name})")
            return
        require(shape == expected, name, shape, f"shape must be {expected} ({path.name})")
        if a.packing is not None and name.endswith(_WORDS):
            require(dtype == _WORD_DTYPE, name, dtype, f"dtype must be {_WORD_DTYPE} ({path.name})")
            return
        allowed = f"dtype must be one of {', '.join(_DTYPES)} ({path.name}): take the checkpoint before quantisation"
        require(dtype in _DTYPES, name, dtype, allowed)


def _files(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint: the only one, or the shards of its index."""
    paths = weight_files(folder)
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        # From the index itself: one may be missing, or lie in another folder.
        return [_shard(folder, name) for name in shard_names(folder)]
    require(len(paths) == 1, "checkpoint", str(folder), f"must hold {SINGLE}, or {INDEX} and its shards")
    return paths


def _shard(folder: Path, name: str) -> Path:
    plain = Path(name).name == name and name.endswith(".safetensors")
    require(plain, "weight_map", name, "names of *.safetensors files in the checkpoint's folder")
    if not (folder / name).is_file():
        raise InvalidInputError("checkpoint", str(folder), f"lacks the shard {name} that {INDEX} names")
    return folder / name
