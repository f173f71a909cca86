"""How quantised checkpoints hold the linears of their layers: what config.json says of it, as data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shapeshift.settings import require

AWQ, GPTQ, GGUF, FP8, MXFP4 = "awq", "gptq", "gguf", "fp8", "mxfp4"
WORDS, SIGNED = "pack-quantized", "int-quantized"
"""Formats of compressed-tensors: levels in 32-bit words, and as signed bytes."""
WORD_BITS = 32
PLAIN = ("F32", "F16", "BF16")
"""The dtypes of numbers, as safetensors calls them."""
FP8_DTYPE = "F8_E4M3"
_METHODS = "awq, gptq, compressed-tensors, fp8, fbgemm_fp8 or mxfp4"
# Fields that are read, and such as say how weights were made, which of them are plain, or how activations are rounded.
_OF_COMPRESSED = (
    *("quant_method", "format", "config_groups", "sparsity_config"),
    *("ignore", "quantization_status", "global_compression_ratio", "version"),
)
_OF_GROUP = ("targets", "weights", "format", "input_activations", "output_activations")
_OF_WEIGHTS = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder"),
    *("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
)
_OF_FP8 = (
    *("quant_method", "weight_block_size", "fmt", "scale_fmt", "expert_dtype"),
    *("activation_scheme", "modules_to_not_convert", "ignored_layers", "dequantize"),
)
_OF_FBGEMM = ("quant_method", "activation_scale_ub", "modules_to_not_convert")
_OF_MXFP4 = ("quant_method", "modules_to_not_convert", "dequantize")
_STEP = 32
"""A group has a multiple of so many inputs."""
_MXFP4_GROUP = 32


@dataclass(frozen=True)
class Part:
    """A tensor of a packed linear: its shape, further shapes that it may have, and its dtypes.

    optional: the files may have it for some of the linears, or for none.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = PLAIN
    others: tuple[tuple[int, ...], ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Packing:
    """How each linear of the layers lies in the files, with scales of groups of inputs.

    method  awq (the layout gemm: words hold 8 outputs), gptq and pack-quantized (words hold 8 inputs, or 4),
            int-quantized (signed bytes), gguf, whose blocks `gguf.tensors` describes, mxfp4 (of experts alone: 4-bit
            floats that share an exponent), or fp8
    bits    of a level: 4, or 8 with gptq, gguf, int-quantized and pack-quantized; 8 of mxfp4, whose values are levels
            of so many; 0 of fp8, which has none
    group   inputs of a group; 0: all
    less    what is subtracted from a zero before it is stored
    centred  zeros are not stored: they are in the middle of the levels
    blocks  of fp8: outputs and inputs that share a scale; empty: those of an output, or all
    scale   of fp8: the name of the scales
    """

    method: str
    bits: int
    group: int
    less: int = 0
    centred: bool = False
    blocks: tuple[int, ...] = ()
    scale: str = "weight_scale"

    @property
    def per_word(self) -> int:
        """Levels in a word."""
        return WORD_BITS // self.bits

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def parts(self, outputs: int, inputs: int) -> dict[str, Part]:
        """The tensors of a linear without its bias. Raises InvalidInputError for what does not fit whole words."""
        return _PARTS[self.method](self, outputs, inputs)

    def _require_words(self, packed: int, outputs: int, inputs: int) -> None:
        word = self.per_word
        require(packed % word == 0, "quantization_config", [outputs, inputs], f"linears in whole words of {word}")


def _awq(packing: Packing, outputs: int, inputs: int) -> dict[str, Part]:
    packing._require_words(outputs, outputs, inputs)
    word, groups = packing.per_word, packing.groups(inputs)
    return {
        "qweight": Part((inputs, outputs // word), ("I32",)),
        "qzeros": Part((groups, outputs // word), ("I32",)),
        "scales": Part((groups, outputs)),
    }


def _gptq(packing: Packing, outputs: int, inputs: int) -> dict[str, Part]:
    for packed in (outputs, inputs):
        packing._require_words(packed, outputs, inputs)
    word, groups = packing.per_word, packing.groups(inputs)
    return {
        "qweight": Part((inputs // word, outputs), ("I32",)),
        "qzeros": Part((groups, outputs // word), ("I32",)),
        "scales": Part((groups, outputs)),
        "g_idx": Part((inputs,), ("I32",)),
    }


def _words(packing: Packing, outputs: int, inputs: int) -> dict[str, Part]:
    packing._require_words(inputs, outputs, inputs)
    word, groups = packing.per_word, packing.groups(inputs)
    parts = {
        "weight_packed": Part((outputs, inputs // word), ("I32",)),
        "weight_scale": Part((outputs, groups)),
        "weight_shape": Part((2,), ("I64", "I32")),
    }
    if not packing.centred:
        packing._require_words(outputs, outputs, inputs)
        parts["weight_zero_point"] = Part((outputs // word, groups), ("I32",))
    return parts


def _signed(packing: Packing, outputs: int, inputs: int) -> dict[str, Part]:
    groups = packing.groups(inputs)
    parts = {"weight": Part((outputs, inputs), ("I8",)), "weight_scale": Part((outputs, groups))}
    if not packing.centred:
        parts["weight_zero_point"] = Part((outputs, groups), ("I8",))
    return parts


def _fp8(packing: Packing, outputs: int, inputs: int) -> dict[str, Part]:
    scales = Part((outputs, 1), others=((1,), ()), optional=True)
    if packing.blocks:
        sizes = zip((outputs, inputs), packing.blocks, strict=True)
        scales = Part(tuple(-(-size // block) for size, block in sizes), optional=True)
    # A linear that stays plain has no scales.
    return {"weight": Part((outputs, inputs), (FP8_DTYPE, *PLAIN)), packing.scale: scales}


def _mxfp4(packing: Packing, outputs: int, inputs: int) -> dict[str, Part]:
    require(inputs % _MXFP4_GROUP == 0, "quantization_config", [outputs, inputs], f"groups of {_MXFP4_GROUP} inputs")
    groups = inputs // _MXFP4_GROUP
    blocks = Part((outputs, groups, _MXFP4_GROUP // 2), ("U8",))
    return {"blocks": blocks, "scales": Part((outputs, groups), ("U8",))}


_PARTS: dict[str, Callable[[Packing, int, int], dict[str, Part]]] = {
    AWQ: _awq,
    GPTQ: _gptq,
    WORDS: _words,
    SIGNED: _signed,
    FP8: _fp8,
    MXFP4: _mxfp4,
}


def packing_of(config: Mapping[str, Any]) -> Packing | None:
    """Of the content of a config.json; None where its weights are plain. Raises InvalidInputError for another way to
    quantise, naming the key, its value and what is supported."""
    fields = config.get("quantization_config") or config.get("compression_config")
    if not fields:
        return None
    require(isinstance(fields, dict), "quantization_config", fields, "a JSON object")
    method = fields.get("quant_method")
    allowed = f"{_METHODS}, or weights in f32, f16 or bf16: take the checkpoint they are of"
    require(isinstance(method, str) and method in _METHOD_READERS, "quantization_config", fields, allowed)
    return _METHOD_READERS[str(method)](fields)


def _older(fields: Mapping[str, Any]) -> Packing:
    """AWQ, GPTQ and GGUF."""
    method = fields["quant_method"]
    bits, group = fields.get("bits", fields.get("w_bit")), fields.get("group_size", fields.get("q_group_size", 128))
    widths = (4,) if method == AWQ else (4, 8)
    require(bits in widths, "quantization_config.bits", bits, f"{' or '.join(map(str, widths))} with {method}")
    group = _group(group, "quantization_config.group_size")
    version, ordered = fields.get("version", "gemm"), fields.get("desc_act", False)
    require(str(version).lower() == "gemm" or method != AWQ, "quantization_config.version", version, "gemm with awq")
    require(not ordered, "quantization_config.desc_act", ordered, "false: inputs in the order of their groups")
    plain = fields.get("modules_to_not_convert") or []
    allowed = "at most heads and images: all layers alike"
    require(_is_head(plain), "quantization_config.modules_to_not_convert", plain, allowed)
    require(not fields.get("lm_head"), "quantization_config.lm_head", fields.get("lm_head"), "false: it stays plain")
    less = int(method == GPTQ and fields.get("checkpoint_format", "gptq") == "gptq")
    return Packing(str(method), int(bits), group, less)


def _is_head(modules: object) -> bool:
    heads = ("lm_head", "embed_tokens")
    others = ("visual", "vision", "audio", "multi_modal_projector")
    names = [str(module).removeprefix("model.") for module in modules] if isinstance(modules, list) else [""]
    # The linears of experts alone are packed: their router is none of them.
    return all(name in heads or name.endswith("gate") or name.startswith(others) for name in names)


def _group(group: object, field: str) -> int:
    whole = isinstance(group, int) and not isinstance(group, bool)
    fits = whole and (group == -1 or (int(str(group)) > 0 and int(str(group)) % _STEP == 0))
    require(fits, field, group, f"-1 or a multiple of {_STEP}")
    return max(0, int(str(group)))


def _require_read(fields: Mapping[str, Any], place: str, names: Collection[str]) -> None:
    """Raise InvalidInputError for a field that is set and is none of `names`; place: what stands before its name."""
    for key, value in fields.items():
        allowed = f"absent or null: it is not read, only {', '.join(names)} are"
        require(not value or key in names, place + key, value, allowed)


def _compressed(fields: Mapping[str, Any]) -> Packing:
    """Of compressed-tensors. Activations are quantised as ours, whatever the file says of them."""
    place = "quantization_config."
    _require_read(fields, place, _OF_COMPRESSED)
    sparsity = fields.get("sparsity_config") or {}
    form = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    require(form == "dense", place + "sparsity_config.format", form, "dense or absent")
    groups = fields.get("config_groups")
    require(isinstance(groups, dict) and len(groups) == 1, place + "config_groups", groups, "one group: layers alike")
    ((name, group),) = dict(groups or {}).items()
    place += f"config_groups.{name}."
    weights = group.get("weights") if isinstance(group, dict) else None
    require(isinstance(weights, dict), place + "weights", weights, "a JSON object")
    weights = dict(weights or {})
    _require_read(group, place, _OF_GROUP)
    _require_read(weights, f"{place}weights.", _OF_WEIGHTS)
    require(group.get("targets") == ["Linear"], place + "targets", group.get("targets"), "Linear alone: layers alike")
    form = group.get("format") or fields.get("format")
    kind, bits, place = weights.get("type", "int"), weights.get("num_bits"), place + "weights."
    require(kind in ("int", "float"), place + "type", kind, "int or float")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if kind == "float":
        require(bits == 8, place + "num_bits", bits, "8 with type float")
        require(form in ("float-quantized", "naive-quantized"), "quantization_config.format", form, "float-quantized")
        require(strategy in ("tensor", "channel", "block"), place + "strategy", strategy, "tensor, channel or block")
        blocks = weights.get("block_structure") if strategy == "block" else None
        return Packing(FP8, 0, 0, blocks=_blocks(blocks, place + "block_structure"))
    require(form in (WORDS, SIGNED), "quantization_config.format", form, f"{WORDS} or {SIGNED} with type int")
    require(bits in (4, 8), place + "num_bits", bits, "4 or 8 with type int")
    require(strategy in ("channel", "group"), place + "strategy", strategy, "channel or group with type int")
    order = weights.get("actorder")
    require(order in (None, False, "weight", "static"), place + "actorder", order, "null or weight: groups in order")
    size = _group(weights.get("group_size"), place + "group_size") if strategy == "group" else 0
    return Packing(str(form), int(bits or 0), size, centred=weights.get("symmetric", True) is True)


def _fp8_of(fields: Mapping[str, Any]) -> Packing:
    """Of transformers' finegrained fp8, as DeepSeek, Qwen and Mistral write it, and of AutoFP8, which has no blocks."""
    _require_read(fields, "quantization_config.", _OF_FP8)
    for key, *values in (("scale_fmt", "float"), ("expert_dtype", FP8), ("fmt", "e4m3", "float8_e4m3fn")):
        allowed = f"{', '.join(values)} or absent"
        require(fields.get(key) in (*values, None), f"quantization_config.{key}", fields.get(key), allowed)
    key = "weight_block_size"
    blocks = _blocks(fields.get(key), f"quantization_config.{key}")
    return Packing(FP8, 0, 0, blocks=blocks, scale="weight_scale_inv" if key in fields else "weight_scale")


def _blocks(blocks: object, field: str) -> tuple[int, ...]:
    if blocks is None:
        return ()
    sizes = isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
    require(sizes, field, blocks, "two whole numbers above 0: outputs and inputs that share a scale")
    return tuple(blocks) if isinstance(blocks, list) else ()


def _fbgemm_of(fields: Mapping[str, Any]) -> Packing:
    """Of FBGEMM: a scale for each output."""
    _require_read(fields, "quantization_config.", _OF_FBGEMM)
    return Packing(FP8, 0, 0)


def _mxfp4_of(fields: Mapping[str, Any]) -> Packing:
    _require_read(fields, "quantization_config.", _OF_MXFP4)
    return Packing(MXFP4, 8, _MXFP4_GROUP, centred=True)


_METHOD_READERS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    AWQ: _older,
    GPTQ: _older,
    GGUF: _older,
    "compressed-tensors": _compressed,
    FP8: _fp8_of,
    "fbgemm_fp8": _fbgemm_of,
    MXFP4: _mxfp4_of,
}
