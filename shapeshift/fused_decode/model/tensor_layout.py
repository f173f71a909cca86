"""The linears and the tensors of an architecture: their names, their shapes, their order, and the memory they take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.formats.packing import FP8, GGUF, MXFP4, Part
from shapeshift.fused_decode.model.parts import DELTA, DeltaNet
from shapeshift.fused_decode.settings import COMPUTED_BYTES, HEAD_BITS, QUANTISED, WEIGHT_BITS, computed, group_of
from shapeshift.settings import require

Shape = tuple[int, ...]
SHARED = ".shared"
"""The end of the names of a shared expert's linears."""
_EXPERT_PAIRS = 4096  # kMostPairs of kernels/experts.h


@dataclass(frozen=True)
class Stacked:
    """A linear of a layer: the tensors that it is stacked from, and the outputs of each.

    place  its place in the tensors of all experts, see `architecture.Experts.whole`; None: it has tensors of its own
    columns, alternating  its weight is [inputs, outputs]; outputs of both halves alternate
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int
    biased: bool
    place: int | None = None
    columns: bool = False
    alternating: bool = False

    def tensor(self, module: str, part: str) -> str:
        """The name of a part, such as weight or bias, of one of its modules."""
        if self.place is None:
            return f"{module}.{part}"
        # Those of all experts are parameters of one module.
        return module if part == "weight" else f"{module}_{part.removeprefix('weight_')}"


def linears(architecture: Architecture) -> dict[str, Stacked]:
    """The linears of a layer; those of experts have their number behind a dot, those of the shared one `SHARED`."""
    a, names = architecture, architecture.tensors
    experts, delta = a.experts, a.delta
    queries = 2 * a.query_width if a.gated_heads else a.query_width
    qkv, output = (names.qkv, names.output) if delta is None else (delta.inputs, f"{DELTA}out_proj")
    parts: tuple[int, ...] = (queries,) if a.kv_layer >= 0 else (queries, a.kv_width, a.kv_width)
    if delta is not None:
        parts = delta.channels, delta.values
    result = {
        "qkv": Stacked(*(qkv, parts if len(qkv) > 1 else (sum(parts),), a.hidden, a.qkv_bias), columns=names.columns),
        "output": Stacked(
            (output,), (a.hidden,), delta.values if delta else a.query_width, a.output_bias, columns=names.columns
        ),
    }
    if a.layer_inputs:
        result["input_gate"] = Stacked((names.input_gate,), (a.layer_inputs,), a.hidden, False)
        result["input_projection"] = Stacked((names.input_projection,), (a.hidden,), a.layer_inputs, False)
    if experts is None or a.beside:
        result |= _mlp(a, "", names.gate_up, names.down, a.intermediate)
    if experts is None:
        return result
    for number in range(experts.count):
        gate_up = tuple(name.format(number) for name in names.expert_gate_up)
        one = _mlp(a, f".{number}", gate_up, names.expert_down.format(number), experts.width)
        if experts.whole:
            one = {name: replace(linear, place=number, columns=experts.columns) for name, linear in one.items()}
        if experts.alternating:
            one[f"gate_up.{number}"] = replace(one[f"gate_up.{number}"], alternating=True)
        result |= one
    if experts.shared:
        result |= _mlp(a, SHARED, names.shared_gate_up, names.shared_down, experts.shared)
    return result


def _mlp(a: Architecture, end: str, gate_up: tuple[str, ...], down: str, width: int) -> dict[str, Stacked]:
    """The linears of an MLP with these tensors; end: of their names."""
    halves = (width, width) if len(gate_up) > 1 else ((2 if a.gated else 1) * width,)
    return {
        f"gate_up{end}": Stacked(gate_up, halves, a.hidden, a.mlp_bias, columns=a.tensors.columns),
        f"down{end}": Stacked((down,), (a.hidden,), width, a.mlp_bias, columns=a.tensors.columns),
    }


def all_linears(architecture: Architecture) -> list[tuple[int, Stacked]]:
    """The linears of all layers, each with the number of its layer."""
    a = architecture
    return [(layer, one) for layer in range(a.layers) for one in linears(a.layer(layer)).values()]


def layer_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name within a layer and shape of every tensor of one layer, see `Architecture.layer`."""
    a, names = architecture, architecture.tensors
    named: dict[str, Shape] = {}
    for one in linears(a).values():
        all_experts = _experts(a, one)
        for name, outputs in zip(one.names, one.outputs, strict=True):
            both = (one.inputs, outputs) if one.columns else (outputs, one.inputs)
            named[one.tensor(name, "weight")] = (*all_experts, *both)
            if one.biased:
                named[one.tensor(name, "bias")] = (*all_experts, outputs)
    if a.experts is not None:
        named[f"{names.router}.weight"] = (a.experts.count, a.hidden)
        if a.experts.biased:
            named[f"{names.router}.bias"] = (a.experts.count,)
        if a.experts.correction:
            named[names.correction] = a.experts.correction
        if a.experts.shared_gate:
            named[f"{names.shared_gate}.weight"] = (1, a.hidden)
        if a.experts.scaled:
            named |= {names.router_scale: (a.hidden,), names.expert_scales: (a.experts.count,)}
    if a.delta is not None:
        named |= _delta_shapes(a.delta, a.hidden)
    if a.sinks:
        named[names.sinks] = (a.heads,)
    if a.layer_scale:
        named[names.layer_scale] = (1,)
    beside = (names.dense_end, names.experts_norm, names.experts_end) if a.beside else ()
    further = (*beside, names.input_norm if a.layer_inputs else "")
    for name in (names.attention_norm, names.attention_end, names.mlp_norm, names.mlp_end, *further):
        named |= _norm_shapes(a, name) if name else {}
    if a.qk_norm:
        rows = a.qk_norm == "row"
        # The keys of another layer have their norm there.
        key = (names.key_norm, a.kv_width)
        for name, width in ((names.query_norm, a.query_width), *([key] if a.kv_layer < 0 else [])):
            named |= {f"{name}.weight": (width if rows else a.head_dim,)} if name else {}
    return named


def _delta_shapes(delta: DeltaNet, hidden: int) -> dict[str, Shape]:
    """The tensors of a delta net beside its linears."""
    shares = {"in_proj_ba": 2 * delta.heads} if delta.stacked else {"in_proj_b": delta.heads, "in_proj_a": delta.heads}
    return {f"{DELTA}{name}.weight": (outputs, hidden) for name, outputs in shares.items()} | {
        f"{DELTA}conv1d.weight": (delta.channels, 1, delta.kernel),
        f"{DELTA}A_log": (delta.heads,),
        f"{DELTA}dt_bias": (delta.heads,),
        f"{DELTA}norm.weight": (delta.value_dim,),
    }


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
    if a.layer_inputs:
        width = a.layers * a.layer_inputs
        named[f"{names.input_table}.weight"] = (a.vocab_size, width)
        named[f"{names.inputs_projection}.weight"] = (width, a.hidden)
        named[f"{names.inputs_norm}.weight"] = (a.layer_inputs,)
    for layer in range(a.layers):
        named |= {f"{names.layers}.{layer}.{name}": shape for name, shape in layer_shapes(a.layer(layer)).items()}
    return named


def stored_parts(architecture: Architecture) -> dict[str, Part]:
    """Every tensor of the files: as `shapes`, with the linears of the layers as they are packed."""
    a = architecture
    result = {name: Part(shape) for name, shape in shapes(a).items()}
    if a.packing is None or a.packing.method == GGUF:
        return result
    require(not a.tensors.columns, "quantization_config", a.packing.method, f"not with a {a.family}")
    whole, by_output = a.experts is not None and a.experts.whole, a.packing.method == FP8 and not a.packing.blocks
    fits = by_output or (a.packing.method == MXFP4) == whole
    require(fits, "quantization_config.quant_method", a.packing.method, f"not with a {a.family}")
    for layer, one in all_linears(a):
        if a.packing.method == MXFP4 and one.place is None:
            continue
        for name, outputs in zip(one.names, one.outputs, strict=True):
            module = f"{a.tensors.layers}.{layer}.{name}"
            result.pop(one.tensor(module, "weight"), None)
            for key, part in a.packing.parts(outputs, one.inputs).items():
                result[one.tensor(module, key)] = part if one.place is None else _of_all(a, one, part)
    return result


def _of_all(a: Architecture, linear: Stacked, part: Part) -> Part:
    """A part as it is in the tensors of all experts, where those in fp8 lie as plain ones do, and their scales as rows
    or as columns."""
    shape, turned = part.shape, part.shape[::-1]
    if linear.columns and a.packing is not None and a.packing.method == FP8:
        shape, turned = turned, shape
    count = _experts(a, linear)
    return replace(part, shape=(*count, *shape), others=((*count, *turned),) if part.optional else ())


def _experts(a: Architecture, linear: Stacked) -> tuple[int, ...]:
    """The first dimension of tensors that hold those of all experts."""
    return () if linear.place is None or a.experts is None else (a.experts.count,)


def _norm_shapes(a: Architecture, name: str) -> dict[str, Shape]:
    parts = ("weight", "bias") if a.norm == "layer" else ("weight",)
    return {f"{name}.{part}": (a.hidden,) for part in parts}


def qkv_order(architecture: Architecture, layer: int) -> torch.Tensor | None:
    """The outputs of a checkpoint's qkv, INT64 [queries, keys and values], in the order of the runtime: all queries,
    all keys, all values, all gates, and each head as `kv_cache.RopeTables` rotates it. None where that is the
    checkpoint's order.
    """
    a, rope = architecture.layer(layer), architecture.ropes[layer]
    if a.delta is not None:
        return parts_order(a.delta.key_heads, _stacked_widths(a.delta)) if a.delta.stacked else None
    gates = a.heads if a.gated_heads else 0
    places = torch.arange(a.query_width + 2 * a.kv_width + gates * a.head_dim).view(-1, a.head_dim)
    if a.tensors.by_head:
        places = places.view(a.heads, 3, a.head_dim).transpose(0, 1).reshape(-1, a.head_dim)
    if gates:
        queries = places[: 2 * gates]
        places = torch.cat([queries[::2], places[2 * gates :], queries[1::2]])
    order = head_order(a.head_dim, rope.rotated if rope else 0, a.interleaved)
    rotating = a.heads + a.kv_heads
    result = torch.cat([places[:rotating, order], places[rotating:]]).flatten()
    return None if torch.equal(result, torch.arange(len(result))) else result


def _stacked_widths(delta: DeltaNet) -> tuple[int, int, int, int]:
    """Of a key head's query, key, values and gates."""
    values = delta.values // delta.key_heads
    return delta.key_dim, delta.key_dim, values, values


def parts_order(heads: int, widths: Sequence[int]) -> torch.Tensor:
    """Places in a tensor that holds parts of these widths head by head, INT64 [heads x widths], part by part."""
    places = torch.arange(heads * sum(widths)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(places, list(widths), dim=1)])


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
    sizes = [(sum(linear.outputs), linear.inputs, bits) for _, linear in all_linears(a)] * ranks
    # One tensor may be the keys and the values of a layer.
    weights = {
        f"{a.tensors.layers}.{layer}.{one.tensor(name, 'weight')}"
        for layer, one in all_linears(a)
        for name in one.names
    }
    others = ranks * sum(math.prod(shape) for name, shape in shapes(a).items() if name not in weights)
    others -= 0 if a.tied else ranks * table
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
    rows = min(tokens, most)

    def of(rows: int, width: int) -> int:
        levels = max(a.hidden, width) if precision in QUANTISED else 0
        return rows * ((a.hidden + 3 * width) * COMPUTED_BYTES[computed(precision)] + levels)

    shared = of(rows, a.experts.shared) if a.experts.shared else 0
    return of(rows * a.experts.chosen, a.experts.width) + shared
