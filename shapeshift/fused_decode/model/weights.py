"""The tensors of a checkpoint: safetensors only, every name and shape checked before any tensor is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import PRECISION_BYTES, Architecture
from shapeshift.settings import require

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
# Every reader derives it from config.json; older checkpoints hold it nevertheless.
_DERIVED = "rotary_emb.inv_freq"

Shape = tuple[int, ...]


def layer_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name within a layer and shape of every tensor of one layer."""
    a = architecture
    linears = {
        "self_attn.q_proj": (a.query_width, a.hidden, a.qkv_bias),
        "self_attn.k_proj": (a.kv_width, a.hidden, a.qkv_bias),
        "self_attn.v_proj": (a.kv_width, a.hidden, a.qkv_bias),
        "self_attn.o_proj": (a.hidden, a.query_width, a.output_bias),
        "mlp.gate_proj": (a.intermediate, a.hidden, a.mlp_bias),
        "mlp.up_proj": (a.intermediate, a.hidden, a.mlp_bias),
        "mlp.down_proj": (a.hidden, a.intermediate, a.mlp_bias),
    }
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns) for name, (rows, columns, _) in linears.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _, biased) in linears.items() if biased}
    shapes |= {"input_layernorm.weight": (a.hidden,), "post_attention_layernorm.weight": (a.hidden,)}
    if a.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (a.head_dim,), "self_attn.k_norm.weight": (a.head_dim,)}
    return shapes


def shapes(architecture: Architecture) -> dict[str, Shape]:
    """Name and shape of every tensor of the model; a tied output head is not listed."""
    a = architecture
    found: dict[str, Shape] = {EMBEDDING: (a.vocab_size, a.hidden), FINAL_NORM: (a.hidden,)}
    if not a.tied:
        found[HEAD] = (a.vocab_size, a.hidden)
    one = layer_shapes(a)
    return found | {f"model.layers.{layer}.{name}": shape for layer in range(a.layers) for name, shape in one.items()}


def weight_bytes(architecture: Architecture, precision: str) -> int:
    """Bytes of the loaded weights. A tied table counts twice: lookup and product need different layouts."""
    held = sum(math.prod(shape) for shape in shapes(architecture).values())
    if architecture.tied:
        held += architecture.vocab_size * architecture.hidden
    return held * PRECISION_BYTES[precision]


class WeightFiles:
    """The safetensors files of a checkpoint folder, checked against an architecture; tensors are read one by one.

    Raises InvalidInputError for a missing or broken shard, for a tensor that is missing, has another shape or a dtype
    other than F32, F16 and BF16, and for a tensor that the architecture does not have.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._wanted = shapes(architecture)
        self._path_of: dict[str, Path] = {}
        for path in _files(folder):
            self._add(path, architecture)
        missing = sorted(self._wanted.keys() - self._path_of.keys())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InvalidInputError("checkpoint", str(folder), f"lacks the tensor {missing[0]}{more}")

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name`, contiguous, as `dtype`; a copy."""
        with safe_open(str(self._path_of[name]), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.to(dtype, copy=True).contiguous()

    def _add(self, path: Path, architecture: Architecture) -> None:
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a mapping
                    piece = file.get_slice(name)
                    self._check(path, name, tuple(piece.get_shape()), piece.get_dtype(), architecture)
                    self._path_of[name] = path
        except (SafetensorError, OSError) as error:
            raise InvalidInputError(path.name, str(path), f"must be a whole safetensors file: {error}") from None

    def _check(self, path: Path, name: str, shape: Shape, dtype: str, architecture: Architecture) -> None:
        wanted = self._wanted.get(name)
        if wanted is None:
            ignored = name.endswith(_DERIVED) or (architecture.tied and name == HEAD)
            require(ignored, name, shape, f"this {architecture.family} has no such tensor ({path.name})")
            return
        require(shape == wanted, name, shape, f"shape must be {wanted} ({path.name})")
        require(dtype in _DTYPES, name, dtype, f"dtype must be one of {', '.join(_DTYPES)} ({path.name})")


def _files(folder: Path) -> list[Path]:
    """The safetensors files of the checkpoint: those of the index, or the only one."""
    if (folder / _INDEX).is_file():
        return [_shard(folder, name) for name in sorted(_shard_names(folder / _INDEX))]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    require(len(found) == 1, "checkpoint", str(folder), f"must hold {_SINGLE}, or {_INDEX} and its shards")
    return found


def _shard_names(index: Path) -> set[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidInputError("checkpoint", str(index), "a JSON object with a weight_map") from None
    return {str(name) for name in names}


def _shard(folder: Path, name: str) -> Path:
    plain = Path(name).name == name and name.endswith(".safetensors")
    require(plain, "weight_map", name, "names of *.safetensors files in the checkpoint's folder")
    if not (folder / name).is_file():
        raise InvalidInputError("checkpoint", str(folder), f"lacks the shard {name} that {_INDEX} names")
    return folder / name
