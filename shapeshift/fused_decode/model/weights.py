"""The tensors of a checkpoint, of safetensors or GGUF: every name and shape is checked before any tensor is read."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.engines.checkpoint import INDEX, SINGLE, shard_names, weight_files
from shapeshift.engines.gguf import tensors as gguf_tensors
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.formats.packing import FP8, FP8_DTYPE, GGUF, MXFP4, PLAIN, Packing, Part
from shapeshift.fused_decode.settings import (
    COMPUTED_BYTES,
    HEAD_BITS,
    QUANTISED,
    WEIGHT_BITS,
    computed,
    group_of,
)
from shapeshift.settings import Choices, require

_LEVELS = "shapeshift.fused_decode.model.formats.levels"
UNPACKED: Choices[Any] = Choices(
    "quantization_config",
    {"tensors": f"{_LEVELS}:unpacked", "blocks": f"{_LEVELS}:of_blocks", "scaled": f"{_LEVELS}:scaled"},
)
"""What reads packed linears, see `formats.levels`."""

Shape = tuple[int, ...]
_MOST_MAPPED = 1 << 28
"""Bytes that are read of open files before they are opened anew: what was read of an open one stays in memory."""
_EXPERT_PAIRS = 4096  # kMostPairs of kernels/experts.h


@dataclass(frozen=True)
class Stacked:
    """A linear of a layer: the tensors that it is stacked from, and the outputs of each.

    place  its place in the tensors of all experts, see `architecture.Experts.whole`; None: it has tensors of its own
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    biased: bool
    place: int | None = None

    def tensor(self, module: str, part: str) -> str:
        """The name of a part, such as weight or bias, of one of its modules."""
        if self.place is None:
            return f"{module}.{part}"
        # Those of all experts are parameters of one module.
        return module if part == "weight" else f"{module}_{part}"


def linears(architecture: Architecture) -> dict[str, Stacked]:
    """The linears of a layer; those of experts have their number behind a dot."""
    a, names = architecture, architecture.tensors
    three, halves = (a.query_width, a.kv_width, a.kv_width), (a.intermediate, a.intermediate)
    gate_up = Stacked(names.gate_up, halves if len(names.gate_up) > 1 else (a.inner_width,), a.hidden, a.mlp_bias)
    down = Stacked((names.down,), (a.hidden,), a.intermediate, a.mlp_bias)
    result = {
        "qkv": Stacked(names.qkv, three if len(names.qkv) > 1 else (sum(three),), a.hidden, a.qkv_bias),
        "output": Stacked((names.output,), (a.hidden,), a.query_width, a.output_bias),
    }
    if a.experts is None:
        return result | {"gate_up": gate_up, "down": down}
    for number, (kind, one) in itertools.product(range(a.experts.count), (("gate_up", gate_up), ("down", down))):
        named = tuple(name.format(number) for name in one.names)
        result[f"{kind}.{number}"] = replace(one, names=named, place=number if a.experts.whole else None)
    return result


def layer_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name within a layer and shape of every tensor of one layer."""
    a, names = architecture, architecture.tensors
    named: dict[str, Shape] = {}
    for one in linears(a).values():
        all_experts = _experts(a, one)
        columns = names.columns or one.place is not None
        for name, outputs in zip(one.names, one.outputs, strict=True):
            both = (one.inputs, outputs) if columns else (outputs, one.inputs)
            named[one.tensor(name, "weight")] = (*all_experts, *both)
            if one.biased:
                named[one.tensor(name, "bias")] = (*all_experts, outputs)
    if a.experts is not None:
        named[f"{names.router}.weight"] = (a.experts.count, a.hidden)
        if a.experts.biased:
            named[f"{names.router}.bias"] = (a.experts.count,)
    if a.sinks:
        named[names.sinks] = (a.heads,)
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


def stored_parts(architecture: Architecture) -> dict[str, Part]:
    """Every tensor of the files: as `shapes`, with the linears of the layers as they are packed."""
    a = architecture
    result = {name: Part(shape) for name, shape in shapes(a).items()}
    if a.packing is None or a.packing.method == GGUF:
        return result
    require(not a.tensors.columns, "quantization_config", a.packing.method, f"not with a {a.family}")
    fits = (a.packing.method == MXFP4) == (a.experts is not None and a.experts.whole)
    require(fits, "quantization_config.quant_method", a.packing.method, f"not with a {a.family}")
    for layer, one in itertools.product(range(a.layers), linears(a).values()):
        if a.packing.method == MXFP4 and one.place is None:
            continue
        for name, outputs in zip(one.names, one.outputs, strict=True):
            module = f"{a.tensors.layers}.{layer}.{name}"
            result.pop(one.tensor(module, "weight"), None)
            for key, part in a.packing.parts(outputs, one.inputs).items():
                result[one.tensor(module, key)] = replace(part, shape=(*_experts(a, one), *part.shape))
    return result


def _experts(a: Architecture, linear: Stacked) -> tuple[int, ...]:
    """The first dimension of tensors that hold those of all experts."""
    return () if linear.place is None or a.experts is None else (a.experts.count,)


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


def experts_bytes(architecture: Architecture, precision: str, tokens: int) -> int:
    """Bytes in which the experts of a layer compute `tokens` tokens: see `kernels/experts.h`; 0 without experts."""
    a = architecture
    if a.experts is None:
        return 0
    most = max(1, _EXPERT_PAIRS // a.experts.chosen)
    pairs = min(tokens, most) * a.experts.chosen
    levels = max(a.hidden, a.intermediate) if precision in QUANTISED else 0
    return pairs * ((a.hidden + 3 * a.intermediate) * COMPUTED_BYTES[computed(precision)] + levels)


class WeightFiles:
    """The files of weights of a checkpoint folder, checked against an architecture; tensors are read one by one.

    Raises InvalidInputError for a missing or broken shard, for a tensor that is missing, has another shape or a dtype
    other than F32, F16 and BF16, and for a tensor that the architecture does not have.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._architecture = architecture
        self._expected = stored_parts(architecture)
        self._linears = linears(architecture)
        # How activations are quantised is ours to choose.
        further = ("input_scale", "activation_scale", "input_zero_point") if architecture.packing else ()
        self._ignored = (*architecture.tensors.ignored, *further)
        self._folder, self._blocks = folder, gguf_tensors.read_index(folder)
        self._places: dict[str, tuple[Path, str]] = {}
        self._opened: dict[Path, Any] = {}
        self._mapped = 0
        # The scales without which what the files have in fp8 means nothing.
        self._scales: set[str] = set()
        for name, entry in self._blocks.items():
            self._place(folder / entry.file, name, entry.shape, PLAIN[0])
        for path in () if self._blocks else _files(folder):
            self._add(path)
        required = self._scales | {name for name, part in self._expected.items() if not part.optional}
        missing = sorted(required - self._places.keys())
        if missing:
            self._require_layers()
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
        if self.packing(name) is not None:
            levels, bias = self.levels(layer, name, dtype)
            return levels.weight().to(dtype), bias
        weights = [self._part(module, linear, "weight", dtype) for module in self._modules(layer, linear)]
        columns = a.tensors.columns or linear.place is not None
        weight, bias = torch.cat([part.T for part in weights] if columns else weights), self._bias(layer, linear, dtype)
        order = self._order(layer, name)
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return weight.contiguous(), bias

    def packing(self, name: str) -> Packing | None:
        """How the files hold one of `linears` in levels; None: as numbers."""
        packing = self._architecture.packing
        if packing is None or not packing.bits:
            return None
        return packing if packing.method != MXFP4 or self._linears[name].place is not None else None

    def levels(self, layer: int, name: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor | None]:
        """As `linear`, of one that is packed, in `quantised.Levels`; `dtype` is that of the bias."""
        linear, packing = self._linears[name], self.packing(name)
        assert packing is not None, "the linear is plain"
        modules = self._modules(layer, linear)
        if packing.method == GGUF:
            weight = UNPACKED["blocks"]([self._block(f"{module}.weight") for module in modules])
        else:
            kinds = packing.parts(sum(linear.outputs), linear.inputs)
            tensors = {
                module: {key: self._stored(linear.tensor(module, key), linear.place) for key in kinds}
                for module in modules
            }
            weight = UNPACKED["tensors"](tensors, packing)
        bias, order = self._bias(layer, linear, dtype), self._order(layer, name)
        return (weight, bias) if order is None else (weight.rows(order), None if bias is None else bias[order])

    def _modules(self, layer: int, linear: Stacked) -> list[str]:
        return [f"{self._architecture.tensors.layers}.{layer}.{name}" for name in linear.names]

    def _part(self, module: str, linear: Stacked, part: str, dtype: torch.dtype) -> torch.Tensor:
        """The weight or the bias as the files have it, a weight in fp8 times its scales."""
        name, packing = linear.tensor(module, part), self._architecture.packing
        scale = f"{module}.{packing.scale}" if packing is not None and packing.method == FP8 else ""
        if part == "weight" and packing is not None and scale in self._scales:
            weight: torch.Tensor = UNPACKED["scaled"](self._stored(name), self._stored(scale), packing.blocks).to(dtype)
            return weight
        return self.read(name, dtype) if linear.place is None else self._stored(name, linear.place).to(dtype)

    def _bias(self, layer: int, linear: Stacked, dtype: torch.dtype) -> torch.Tensor | None:
        if not linear.biased:
            return None
        return torch.cat([self._part(module, linear, "bias", dtype) for module in self._modules(layer, linear)])

    def _order(self, layer: int, name: str) -> torch.Tensor | None:
        """The outputs that the files have, in the order of the runtime; None where that is theirs."""
        linear = self._linears[name]
        if linear.place is not None and name.startswith("gate_up"):
            return torch.arange(sum(linear.outputs)).view(-1, 2).T.flatten()
        return qkv_order(self._architecture, layer) if name == "qkv" else None

    def head_levels(self, name: str) -> Any:
        """The weight `name` of an output head in `quantised.Levels`; None where the files hold it otherwise."""
        entry = self._blocks.get(self._places[name][1])
        held = entry is not None and gguf_tensors.LEVELS.get(entry.kind) == HEAD_BITS
        return UNPACKED["blocks"]([self._block(name)]) if held else None

    def _block(self, name: str) -> tuple[str, torch.Tensor]:
        entry = self._blocks[self._places[name][1]]
        return entry.kind, torch.from_numpy(gguf_tensors.blocks(self._folder, entry))

    def _stored(self, name: str, place: int | None = None) -> torch.Tensor:
        """A tensor as the files hold it; place: that part of it alone."""
        path, stored = self._places[name]
        if self._blocks:
            return torch.from_numpy(gguf_tensors.numbers(self._folder, self._blocks[stored]))
        # Once for many tensors: opening reads the names of all.
        if self._mapped > _MOST_MAPPED:
            self._opened, self._mapped = {}, 0
        if path not in self._opened:
            self._opened[path] = safe_open(str(path), framework="pt")
        file = self._opened[path]
        tensor: torch.Tensor = file.get_tensor(stored) if place is None else file.get_slice(stored)[place]
        self._mapped += tensor.nbytes
        return tensor

    def _require_layers(self) -> None:
        """Raise InvalidInputError for layers of which the files hold nothing, where they hold some."""
        beginning, layers = f"{self._architecture.tensors.layers}.", self._architecture.layers
        numbers = {
            name.removeprefix(beginning).partition(".")[0] for name in self._places if name.startswith(beginning)
        }
        allowed = f"{len(numbers)}: the weights hold so many layers ({self._folder})"
        require(not numbers or layers <= len(numbers), "num_hidden_layers", layers, allowed)

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
        today = names.today(name)
        longer = names.prefix + today
        return longer if today not in self._expected and longer in self._expected else today

    def _check(self, path: Path, name: str, shape: Shape, dtype: str) -> None:
        expected = self._expected.get(name)
        a = self._architecture
        if expected is None:
            ignored = name.endswith(self._ignored) or name.startswith(a.tensors.others)
            require(ignored, name, shape, f"this {a.family} has no such tensor ({path.name})")
            return
        allowed = f"shape must be {expected.shape} by config.json ({path.name})"
        require(shape == expected.shape or shape in expected.others, name, shape, allowed)
        allowed = f"dtype must be one of {', '.join(expected.dtypes)} ({path.name})"
        if expected.dtypes == PLAIN:
            allowed += ": take the checkpoint before quantisation"
        require(dtype in expected.dtypes, name, dtype, allowed)
        if dtype == FP8_DTYPE and a.packing is not None:
            self._scales.add(f"{name.removesuffix('.weight')}.{a.packing.scale}")


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
