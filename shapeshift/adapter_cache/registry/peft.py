"""Adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, checked before they are loaded."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.adapter_cache.lora.batch import Adaptable, Factor, HeadTensor, Part, adaptable_of_decoder, module_of
from shapeshift.engines.checkpoint import weights_sha256
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.settings import require

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNSAFE = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_DTYPES = ("F32", "F16", "BF16")
# Fields of a plain LoRA adapter; every other field must be off.
_PLAIN = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("peft_type", "megatron_core", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
    *("target_modules", "task_type", "use_dora", "use_rslora"),
}
_OFF: tuple[object, ...] = (None, False, "none", [], {}, "")
# Initializations that also change the weights of the base model.
_BASE_CHANGING = ("pissa", "corda", "olora", "loftq", "lora_ga")
_PREFIX = "base_model.model."
# Behind the name of the base model's list of layers.
_NAME = r"\.(\d{1,6})\.(\w+(?:\.\w+)*)\.lora_(?:([AB])\.weight|(magnitude)_vector(?:\.weight)?)"
_MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class BaseModel:
    """The base model that adapters are checked against, its names, and the highest allowed rank.

    folder  of its checkpoint: an adapter may state another folder with the same weights, a DoRA needs its weights
    sha256  hash of its checkpoint
    architecture  of a decoder, which may have another order of outputs than its checkpoint, and DoRAs
    head    tensors of its head, in the order of `adaptable.head`; needed to load an adapter that changes them
    """

    adaptable: Adaptable
    names: Collection[str]
    max_rank: int
    folder: Path
    sha256: str = ""
    architecture: Architecture | None = None
    head: Sequence[torch.Tensor] = ()

    @classmethod
    def of_decoder(
        cls, architecture: Architecture, names: Collection[str], max_rank: int, folder: Path, sha256: str = ""
    ) -> BaseModel:
        """A model that generates. Raises InvalidInputError for one whose layers have several MLPs."""
        return cls(adaptable_of_decoder(architecture), names, max_rank, folder, sha256, architecture)


@dataclass(frozen=True)
class PeftAdapter:
    """A checked adapter.

    stamp: size and modification time of the weights file, which detect a change
    base: whose order of outputs it has, and whose weights a DoRA needs when it is loaded
    head: the tensors of the base model's head that it changes
    """

    folder: Path
    rank: int
    factors: tuple[Factor, ...]
    stamp: tuple[int, int]
    base: BaseModel
    head: tuple[HeadTensor, ...] = ()

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def has_magnitudes(self) -> bool:
        """Whether it is a DoRA."""
        return any(factor.magnitude for factor in self.factors)


def read(folder: Path, base: BaseModel, checked: str = "") -> PeftAdapter:
    """Check the adapter in `folder` by its configuration and the names and shapes of its tensors.

    checked: the hash of a checkpoint whose adapter it is known to be; the stated name of the base model does not count
    if that is the hash of `base`.

    Raises InvalidInputError naming the problem: another kind of adapter, another base model, a rank above the limit, a
    target that the base model lacks, an incomplete file, or weights in a format that can execute code.
    """
    config = _config(folder)
    _check(config, base.adaptable)
    if not (checked and checked == base.sha256):
        _check_base(config.get("base_model_name_or_path"), base)
    file = folder / WEIGHTS
    if not file.is_file():
        unsafe = [name for name in _UNSAFE if (folder / name).exists()]
        reason = f"found only {', '.join(unsafe)}, which can execute code when read; " if unsafe else ""
        raise InvalidInputError("adapter", str(folder), f"{reason}must hold {WEIGHTS}")
    shapes = _shapes(file)
    head, of_head = _head(shapes, config, base)
    factors = _factors({name: shape for name, shape in shapes.items() if name not in of_head}, config, base)
    stat = file.stat()
    rank = max(factor.rank for factor in factors)
    return PeftAdapter(folder, rank, factors, (stat.st_size, stat.st_mtime_ns), base, head)


def require_finite(adapter: PeftAdapter) -> None:
    """Raise InvalidInputError naming the first tensor that contains NaN or infinity, before or after scaling."""
    with safe_open(str(adapter.weights), framework="pt") as file:
        for factor in adapter.factors:
            for name, scale in ((factor.a, 1.0), (factor.b, factor.scale), (factor.magnitude, 1.0)):
                if name:
                    finite = torch.isfinite(file.get_tensor(name).float() * scale).all()
                    require(bool(finite), name, "NaN or infinity", "finite weights")
        for name in (name for one in adapter.head for name in (one.saved, one.a, one.b) if name):
            require(bool(torch.isfinite(file.get_tensor(name)).all()), name, "NaN or infinity", "finite weights")


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    try:
        size = file.stat().st_size
        require(size <= _MAX_CONFIG_BYTES, CONFIG, size, f"at most {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise InvalidInputError("adapter", str(folder), f"must hold a readable {CONFIG}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(CONFIG, str(file), f"JSON ({error})") from None
    require(isinstance(config, dict), CONFIG, str(file), "a JSON object")
    return dict(config)


def _check(config: Mapping[str, Any], base: Adaptable) -> None:
    require(config.get("peft_type") == "LORA", "peft_type", config.get("peft_type"), "LORA")
    for name, value in config.items():
        plain = name in _PLAIN or value in _OFF or (name == "modules_to_save" and bool(base.head))
        # JSON allows names that a log cannot encode.
        shown = name.encode("ascii", "backslashreplace").decode()
        require(plain, shown, value, "not part of LoRA or DoRA, the only supported kinds")
    initialization = config.get("init_lora_weights")
    changed = isinstance(initialization, str) and initialization.lower().startswith(_BASE_CHANGING)
    allowed = "an initialization that keeps the base model (convert the adapter with PEFT)"
    require(not changed, "init_lora_weights", initialization, allowed)
    rank = config.get("r")
    require(_is_count(rank), "r", rank, "a whole number of at least 1")


def _check_base(name: object, base: BaseModel) -> None:
    """Raise InvalidInputError unless `name` is that of the base model, or a folder whose weights are the same files."""
    if not name:
        return
    if isinstance(name, str):
        if name in base.names or Path(name).name in base.names:
            return
        if Path(name).is_dir() and weights_sha256(Path(name)):
            same = weights_sha256(Path(name)) == weights_sha256(base.folder)
            allowed = f"the base model's folder, or one with the same *.safetensors files as {base.folder}"
            require(same, "base_model_name_or_path", name, allowed)
            return
    names = ", ".join(sorted(base.names))
    raise InvalidInputError(
        "base_model_name_or_path",
        name,
        f"a folder with the weights of the served base model, or one of its names: {names} "
        "(base_names in config.pbtxt adds one)",
    )


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            by_name = {}
            for name in opened.keys():  # noqa: SIM118  not a mapping
                piece = opened.get_slice(name)
                require(piece.get_dtype() in _DTYPES, name, piece.get_dtype(), f"one of {', '.join(_DTYPES)}")
                by_name[name] = tuple(piece.get_shape())
            return by_name
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(file.name, str(file), f"must be a complete safetensors file: {error}") from None


def _factors(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], base: BaseModel) -> tuple[Factor, ...]:
    adaptable = base.adaptable
    path = "|".join(map(re.escape, adaptable.paths))
    form = re.compile(rf"{re.escape(_PREFIX)}({path}){_NAME}")
    pairs: dict[tuple[int, str], dict[str, str]] = {}
    for name in shapes:
        match = form.fullmatch(name)
        allowed = f"the name of a LoRA factor of a linear in base_model.model.{adaptable.paths[0]}"
        require(match is not None, name, shapes[name], allowed)
        assert match is not None
        layer, target = int(match[2]), match[3]
        require(layer < adaptable.layers, name, layer, f"the base model has {adaptable.layers} layers")
        require(
            target in adaptable.targets, name, target, f"a linear of the base model: {', '.join(adaptable.targets)}"
        )
        kind = match[4] or match[5]
        pair = pairs.setdefault((layer, target), {})
        require(kind not in pair, name, pair.get(kind), "each factor once")
        pair[kind] = name
    require(bool(pairs), WEIGHTS, "no tensor", "at least one LoRA factor")
    dora = config.get("use_dora")
    require(dora in (None, True, False), "use_dora", dora, "true or false")
    require(not dora or base.architecture is not None, "use_dora", dora, "false over an encoder")
    packed = base.architecture is not None and base.architecture.packing is not None
    require(not (dora and packed), "use_dora", dora, "false over a quantised checkpoint: DoRA needs its plain weights")
    kinds = {"A", "B", "magnitude"} if dora else {"A", "B"}
    allowed = "both factors, lora_A and lora_B, and lora_magnitude_vector with use_dora alone"
    factors = []
    for (layer, target), pair in sorted(pairs.items()):
        require(pair.keys() == kinds, "adapter", sorted(pair.values()), allowed)
        place = adaptable.targets[target]
        part = adaptable.parts[place]
        rank = _rank(shapes, pair, part, base.max_rank)
        scale = _scale(config, module_of(pair["A"]), rank)
        magnitude = pair.get("magnitude", "")
        if magnitude:
            require(
                shapes[magnitude] == (part.outputs,), magnitude, shapes[magnitude], f"shape must be ({part.outputs},)"
            )
        factors.append(Factor(layer, *place, rank, scale, pair["A"], pair["B"], magnitude))
    return tuple(factors)


def _head(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], base: BaseModel
) -> tuple[tuple[HeadTensor, ...], set[str]]:
    """What the adapter changes in the base model's head; and the names of its tensors that concern no layer."""
    adaptable = base.adaptable
    of_head = {
        name for name in shapes if name.removeprefix(_PREFIX).startswith(tuple(f"{one}." for one in adaptable.unused))
    }
    tensors = []
    for index, (name, shape) in enumerate(adaptable.head.items()):
        module, _, kind = name.rpartition(".")
        a, b = (f"{_PREFIX}{module}.lora_{letter}.weight" for letter in "AB")
        tensor = HeadTensor(index, shape)
        if (saved := _PREFIX + name) in shapes:
            labels = ": labels as the base model has them" if shape != shapes[saved] else ""
            require(shapes[saved] == shape, saved, shapes[saved], f"shape must be {shape}{labels}")
            tensor = replace(tensor, saved=saved)
        if kind == "weight" and a in shapes:
            part = Part(shape[1], 0, shape[0])
            require(b in shapes, "adapter", a, "both factors, lora_A and lora_B")
            rank = _rank(shapes, {"A": a, "B": b}, part, base.max_rank)
            tensor = replace(tensor, a=a, b=b, scale=_scale(config, module, rank))
        if tensor != HeadTensor(index, shape):
            of_head |= {name for name in (tensor.saved, tensor.a, tensor.b) if name}
            tensors.append(tensor)
    return tuple(tensors), of_head


def _rank(shapes: Mapping[str, tuple[int, ...]], pair: Mapping[str, str], part: Part, limit: int) -> int:
    a, b = shapes[pair["A"]], shapes[pair["B"]]
    require(len(a) == 2 and a[1] == part.inputs, pair["A"], a, f"shape must be (rank, {part.inputs})")
    rank = a[0]
    require(1 <= rank <= limit, pair["A"], rank, f"a rank of 1 to max_rank ({limit})")
    require(b == (part.outputs, rank), pair["B"], b, f"shape must be ({part.outputs}, {rank})")
    return rank


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """The factor by which PEFT scales this module's term. Raises InvalidInputError for another rank than stated."""
    rank_in_config = _pattern(config, "rank_pattern", module, config["r"])
    require(rank_in_config == rank, "r", rank_in_config, f"the rank of the factors of {module}, {rank}")
    alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and abs(alpha) <= sys.float_info.max
    require(number, "lora_alpha", alpha, "a finite number")
    rslora = config.get("use_rslora")
    require(rslora in (None, True, False), "use_rslora", rslora, "true or false")
    return float(alpha) / (math.sqrt(rank) if rslora else rank)


def _pattern(config: Mapping[str, Any], field: str, module: str, default: Any) -> Any:
    """The value of the first key that equals `module` or its end. Raises InvalidInputError for a regular expression."""
    patterns = config.get(field) or {}
    require(isinstance(patterns, dict), field, patterns, "an object")
    for key, value in patterns.items():
        require(re.fullmatch(r"[\w.]+", key) is not None, field, key, "names of modules, such as q_proj")
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
