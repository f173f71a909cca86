"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors, checked before anything is loaded."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.adapter_cache.layout import TARGETS, Factor, Part, parts
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.architecture import Architecture
from shapeshift.settings import require

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNSAFE = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_DTYPES = ("F32", "F16", "BF16")
# What a plain LoRA adapter may state; whatever else is stated must be off.
_PLAIN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "peft_type"),
    *("megatron_core", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
    *("target_modules", "task_type", "use_rslora"),
}
_OFF: tuple[object, ...] = (None, False, "none", [], {}, "")
# Ways to begin that also change the base's weights.
_CHANGED_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")
_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d{1,6})\.(\w+\.\w+)\.lora_([AB])\.weight")
_LARGEST_CONFIG = 1 << 20


@dataclass(frozen=True)
class PeftAdapter:
    """A checked adapter. stamp: size and time of its weights' file, by which a change of it is noticed."""

    folder: Path
    rank: int
    factors: tuple[Factor, ...]
    stamp: tuple[int, int]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


@dataclass(frozen=True)
class Base:
    """What adapters are checked against: the base model, the names it goes by, and the greatest rank allowed."""

    architecture: Architecture
    names: Collection[str]
    max_rank: int


def read(folder: Path, base: Base) -> PeftAdapter:
    """The adapter in `folder`, by its configuration and the names and shapes of its tensors.

    Raises InvalidInputError naming what cannot be served: another kind of adapter, another base, a rank above
    the limit, a target that the base lacks, a file that is not whole, weights that could execute code.
    """
    config = _config(folder)
    _check(config, base)
    file = folder / WEIGHTS
    if not file.is_file():
        unsafe = [name for name in _UNSAFE if (folder / name).exists()]
        found = f"found only {', '.join(unsafe)}, which can execute code when read; " if unsafe else ""
        raise InvalidInputError("adapter", str(folder), f"{found}must hold {WEIGHTS}")
    factors = _factors(_shapes(file), config, base)
    stat = file.stat()
    return PeftAdapter(folder, max(one.rank for one in factors), factors, (stat.st_size, stat.st_mtime_ns))


def require_finite(adapter: PeftAdapter) -> None:
    """Raise InvalidInputError naming the first tensor that holds NaN or an infinity, or does once it is scaled."""
    with safe_open(str(adapter.weights), framework="pt") as file:
        for factor in adapter.factors:
            for name, scale in ((factor.a, 1.0), (factor.b, factor.scale)):
                finite = torch.isfinite(file.get_tensor(name).float() * scale).all()
                require(bool(finite), name, "NaN or infinity", "finite weights")


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    try:
        require(file.stat().st_size <= _LARGEST_CONFIG, CONFIG, file.stat().st_size, f"at most {_LARGEST_CONFIG} bytes")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidInputError("adapter", str(folder), f"must hold a readable {CONFIG}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(CONFIG, str(file), f"JSON ({error})") from None
    require(isinstance(config, dict), CONFIG, str(file), "a JSON object")
    return dict(config)


def _check(config: Mapping[str, Any], base: Base) -> None:
    require(config.get("peft_type") == "LORA", "peft_type", config.get("peft_type"), "LORA")
    for name, value in config.items():
        plain = name in _PLAIN or value in _OFF
        # JSON knows names that no log can hold.
        shown = name.encode("ascii", "backslashreplace").decode()
        require(plain, shown, value, "not part of plain LoRA, which alone is served")
    begun = config.get("init_lora_weights")
    changed = isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASES)
    require(not changed, "init_lora_weights", begun, "weights that leave the base as it is (convert them with PEFT)")
    rank = config.get("r")
    require(_is_count(rank), "r", rank, "a whole number of at least 1")
    stated = config.get("base_model_name_or_path")
    if stated:
        known = ", ".join(sorted(base.names))
        same = isinstance(stated, str) and (stated in base.names or Path(stated).name in base.names)
        require(same, "base_model_name_or_path", stated, f"the base that is served: {known}")


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            found = {}
            for name in opened.keys():  # noqa: SIM118  not a mapping
                piece = opened.get_slice(name)
                require(piece.get_dtype() in _DTYPES, name, piece.get_dtype(), f"one of {', '.join(_DTYPES)}")
                found[name] = tuple(piece.get_shape())
            return found
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(file.name, str(file), f"must be a whole safetensors file: {error}") from None


def _factors(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], base: Base) -> tuple[Factor, ...]:
    known = parts(base.architecture)
    pairs: dict[tuple[int, str], dict[str, str]] = {}
    for name in shapes:
        match = _NAME.fullmatch(name)
        require(match is not None, name, shapes[name], "the name of a LoRA factor of a layer's linear")
        assert match is not None
        layer, target = int(match[1]), match[2]
        require(layer < base.architecture.layers, name, layer, f"the base has {base.architecture.layers} layers")
        require(target in TARGETS, name, target, f"a linear that the base has: {', '.join(TARGETS)}")
        pairs.setdefault((layer, target), {})[match[3]] = name
    require(bool(pairs), WEIGHTS, "no tensor", "at least one LoRA factor")
    made = []
    for (layer, target), pair in sorted(pairs.items()):
        require(pair.keys() == {"A", "B"}, "adapter", sorted(pair.values()), "both factors, lora_A and lora_B")
        place = TARGETS[target]
        rank = _rank(shapes, pair, known[place], base.max_rank)
        scale = _scale(config, f"model.layers.{layer}.{target}", rank)
        made.append(Factor(layer, *place, rank, scale, pair["A"], pair["B"]))
    return tuple(made)


def _rank(shapes: Mapping[str, tuple[int, ...]], pair: Mapping[str, str], part: Part, limit: int) -> int:
    a, b = shapes[pair["A"]], shapes[pair["B"]]
    require(len(a) == 2 and a[1] == part.inputs, pair["A"], a, f"shape must be (rank, {part.inputs})")
    rank = a[0]
    require(1 <= rank <= limit, pair["A"], rank, f"a rank of 1 to max_rank ({limit})")
    require(b == (part.outputs, rank), pair["B"], b, f"shape must be ({part.outputs}, {rank})")
    return rank


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """What PEFT multiplies this module's term with. Raises InvalidInputError for a rank that was not stated."""
    stated = _pattern(config, "rank_pattern", module, config["r"])
    require(stated == rank, "r", stated, f"the rank of the factors of {module}, {rank}")
    alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and abs(alpha) <= sys.float_info.max
    require(number, "lora_alpha", alpha, "a finite number")
    rslora = config.get("use_rslora")
    require(rslora in (None, True, False), "use_rslora", rslora, "true or false")
    return float(alpha) / (math.sqrt(rank) if rslora else rank)


def _pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """The value of the first key that names `module` or its end; keys that are more than names are refused."""
    patterns = config.get(field) or {}
    require(isinstance(patterns, dict), field, patterns, "an object")
    for key, value in patterns.items():
        require(re.fullmatch(r"[\w.]+", key) is not None, field, key, "names of modules, such as q_proj")
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
