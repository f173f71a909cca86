"""The tensors of a checkpoint, of safetensors or GGUF: every name and shape is checked before any tensor is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shapeshift.engines.checkpoint import INDEX, SINGLE, shard_names, weight_files
from shapeshift.engines.gguf import tensors as gguf_tensors
from shapeshift.errors import InvalidInputError
from shapeshift.fused_decode.model.architecture import Architecture
from shapeshift.fused_decode.model.formats.packing import FP8, FP8_DTYPE, GGUF, MXFP4, PLAIN, Packing
from shapeshift.fused_decode.model.tensor_layout import Shape, Stacked, linears, qkv_order, stored_parts
from shapeshift.fused_decode.settings import HEAD_BITS
from shapeshift.settings import Choices, require

_LEVELS = "shapeshift.fused_decode.model.formats.levels"
UNPACKED: Choices[Any] = Choices(
    "quantization_config",
    {"tensors": f"{_LEVELS}:unpacked", "blocks": f"{_LEVELS}:of_blocks", "scaled": f"{_LEVELS}:scaled"},
)
"""What reads packed linears, see `formats.levels`."""

_MOST_MAPPED = 1 << 28
"""Bytes that are read of open files before they are opened anew: what was read of an open one stays in memory."""


class WeightFiles:
    """The files of weights of a checkpoint folder, checked against an architecture; tensors are read one by one.

    Raises InvalidInputError for a missing or broken shard, for a tensor that is missing, has another shape or a dtype
    other than F32, F16 and BF16, and for a tensor that the architecture does not have.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._architecture = architecture
        self._expected = stored_parts(architecture)
        self._linears = [linears(architecture.layer(index)) for index in range(architecture.layers)]
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
        linear = self._linears[layer][name]
        if self.packing(layer, name) is not None:
            levels, bias = self.levels(layer, name, dtype)
            return levels.weight().to(dtype), bias
        weights = [self._part(module, linear, "weight", dtype) for module in self._modules(layer, linear)]
        weight = torch.cat([part.T for part in weights] if linear.columns else weights)
        bias = self._bias(layer, linear, dtype)
        order = self._order(layer, name)
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return weight.contiguous(), bias

    def packing(self, layer: int, name: str) -> Packing | None:
        """How the files hold one of `linears` in levels; None: as numbers."""
        packing = self._architecture.packing
        if packing is None or not packing.bits:
            return None
        return packing if packing.method != MXFP4 or self._linears[layer][name].place is not None else None

    def levels(self, layer: int, name: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor | None]:
        """As `linear`, of one that is packed, in `quantised.Levels`; `dtype` is that of the bias."""
        linear, packing = self._linears[layer][name], self.packing(layer, name)
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
        name, packing, place = linear.tensor(module, part), self._architecture.packing, linear.place
        scale = linear.tensor(module, packing.scale) if packing is not None and packing.method == FP8 else ""
        if part == "weight" and packing is not None and scale in self._scales:
            scales = self._stored(scale, place)
            if place is not None:
                scales = scales.view(1, -1) if linear.columns else scales.view(-1, 1)
            weight: torch.Tensor = UNPACKED["scaled"](self._stored(name, place), scales, packing.blocks).to(dtype)
            return weight
        return self.read(name, dtype) if place is None else self._stored(name, place).to(dtype)

    def _bias(self, layer: int, linear: Stacked, dtype: torch.dtype) -> torch.Tensor | None:
        if not linear.biased:
            return None
        return torch.cat([self._part(module, linear, "bias", dtype) for module in self._modules(layer, linear)])

    def _order(self, layer: int, name: str) -> torch.Tensor | None:
        """The outputs that the files have, in the order of the runtime; None where that is theirs."""
        linear = self._linears[layer][name]
        if linear.alternating:
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
            module, scale = name.removesuffix(".weight"), a.packing.scale
            # Those of all experts are no module.
            self._scales.add(f"{module}.{scale}" if module != name else f"{name}_{scale.removeprefix('weight_')}")


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
