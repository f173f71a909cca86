"""Checkpoints whose linears are quantised already: what quantization_config in their config.json says (AWQ, GPTQ)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shapeshift.settings import require

AWQ, GPTQ = "awq", "gptq"
WORD_BITS = 32
_STEP = 32
"""A group has a multiple of so many inputs."""


@dataclass(frozen=True)
class Packing:
    """How each linear of the layers lies in the files: levels in 32-bit words, scales and zeros of groups of inputs.

    method  awq (the layout gemm: words hold 8 outputs) or gptq (words hold 8 inputs, or 4)
    bits    of a level: 4, or 8 with gptq
    group   inputs of a group; 0: all
    less    what is subtracted from a zero before it is stored
    """

    method: str
    bits: int
    group: int
    less: int

    @property
    def per_word(self) -> int:
        """Levels in a word."""
        return WORD_BITS // self.bits

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors of a linear without its bias."""
        return ("qweight", "qzeros", "scales") if self.method == AWQ else ("qweight", "qzeros", "scales", "g_idx")

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of the tensors of a linear without its bias. Raises InvalidInputError for what does not fit
        whole words."""
        word, groups = self.per_word, self.groups(inputs)
        packed = outputs if self.method == AWQ else inputs
        require(packed % word == 0, "quantization_config", [outputs, inputs], f"linears in whole words of {word}")
        require(outputs % word == 0, "quantization_config", [outputs, inputs], f"outputs in whole words of {word}")
        levels = (inputs, outputs // word) if self.method == AWQ else (inputs // word, outputs)
        shapes = (levels, (groups, outputs // word), (groups, outputs), (inputs,))
        return dict(zip(self.parts, shapes, strict=False))


def packing_of(config: Mapping[str, Any]) -> Packing | None:
    """Of the content of a config.json; None where its weights are plain. Raises InvalidInputError for another way to
    quantise, naming the key, its value and what is supported."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    require(isinstance(stated, dict), "quantization_config", stated, "a JSON object")
    method = stated.get("quant_method")
    allowed = "awq or gptq, or weights in f32, f16 or bf16: take the checkpoint they are of"
    require(method in (AWQ, GPTQ), "quantization_config", stated, allowed)
    bits, group = stated.get("bits", stated.get("w_bit")), stated.get("group_size", stated.get("q_group_size", 128))
    widths = (4,) if method == AWQ else (4, 8)
    require(bits in widths, "quantization_config.bits", bits, f"{' or '.join(map(str, widths))} with {method}")
    whole = isinstance(group, int) and not isinstance(group, bool)
    fits = whole and (group == -1 or (group > 0 and group % _STEP == 0))
    require(fits, "quantization_config.group_size", group, f"-1 or a multiple of {_STEP}")
    version, ordered = stated.get("version", "gemm"), stated.get("desc_act", False)
    require(str(version).lower() == "gemm" or method == GPTQ, "quantization_config.version", version, "gemm with awq")
    require(not ordered, "quantization_config.desc_act", ordered, "false: inputs in the order of their groups")
    plain = stated.get("modules_to_not_convert") or []
    require(_is_head(plain), "quantization_config.modules_to_not_convert", plain, "at most lm_head: all layers alike")
    require(not stated.get("lm_head"), "quantization_config.lm_head", stated.get("lm_head"), "false: it stays plain")
    less = int(method == GPTQ and stated.get("checkpoint_format", "gptq") == "gptq")
    return Packing(str(method), int(bits), max(0, int(group)), less)


def _is_head(modules: Sequence[object]) -> bool:
    return all(module in ("lm_head", "embed_tokens", "model.embed_tokens") for module in modules)
