"""Writes a transformers model as the native encoder reads it. A serving process does not import it."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from shapeshift.engines.hardware import cpu_has_bf16
from shapeshift.engines.interfaces import Array
from shapeshift.engines.native import encoder
from shapeshift.engines.native.layouts import ACTIVATIONS, LAYOUTS, SAME_ACTIVATION, Layout, refusal
from shapeshift.engines.settings import POOLINGS
from shapeshift.errors import UnsupportedError
from shapeshift.kernels.levels import Levels, quantise

_PRECISIONS = ("f32", "bf16", "int8")
_MOST_POSITIONS = 8192
"""Of a text, of those that turn queries and keys."""
_EVERY_TOKEN = -1
_ROWS_AT_ONCE = 1 << 16


@dataclass
class _Part:
    """tensors: of the file, by their names in the kernels; numbers: by name."""

    tensors: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def write(module: Any, example: Mapping[str, Array], folder: Path, precision: str) -> list[str]:
    """Write a `PackedEncoder` into `folder`. Raises UnsupportedError for a model that the kernels do not compute."""
    if precision not in _PRECISIONS:
        raise UnsupportedError(f"precision: provider native computes in {', '.join(_PRECISIONS)}, not {precision}")
    if "IMPORTANCE" in module.output_names:
        raise UnsupportedError("output: provider native keeps no probabilities of attention, as IMPORTANCE needs them")
    if reason := refusal(module.model.config.to_dict()):
        raise UnsupportedError(reason)
    layout = LAYOUTS[module.model.config.model_type]
    with torch.inference_mode():
        pooling = _pooling(module)
        _Writer(module, layout, precision, encoder.load(folder)).save(folder, pooling, module.row_outputs)
        if pooling is not None:
            return [encoder.WEIGHTS]
        ids, segments, positions, rows = (torch.from_numpy(example[name]) for name in module.input_axes)
        hidden = torch.zeros(1, ids.shape[1], module.model.config.hidden_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = _WithHead(module.row_outputs)
            example_inputs = (hidden, ids, segments, positions, rows, *outputs.head)
            traced = torch.jit.trace(outputs, example_inputs, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, str(folder / encoder.ROWS))
    return [encoder.WEIGHTS, encoder.ROWS]


def _pooling(module: Any) -> dict[str, Any] | None:
    """How the kernels pool, where nothing follows but the length of 1; None: the outputs are a module of torch."""
    embedding = module.row_outputs.embedding
    if module.output_names != ("EMBEDDING",) or len(embedding.dense):
        return None
    return {"modes": [POOLINGS.index(mode) for mode in embedding.pooling], "normalize": embedding.normalize}


class _WithHead(nn.Module):
    """The outputs of rows, whose head's parameters, `head`, are inputs behind the others."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self._rows = copy.deepcopy(rows)
        self.head = []
        self._places: list[tuple[nn.Module, str]] = []
        for name, parameter in rows.named_parameters():
            if _is_of_head(name):
                path, _, leaf = name.rpartition(".")
                owner = self._rows.get_submodule(path)
                # What stays a parameter is a constant of the traced module.
                delattr(owner, leaf)
                self.head.append(parameter)
                self._places.append((owner, leaf))

    def forward(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        segments: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        *head: torch.Tensor,
    ) -> Any:
        for (owner, leaf), tensor in zip(self._places, head, strict=True):
            setattr(owner, leaf, tensor)
        return self._rows(hidden, ids, segments, positions, rows)


def _is_of_head(name: str) -> bool:
    return name.startswith("head.")


class _Writer:
    def __init__(self, module: Any, layout: Layout, precision: str, operators: Any) -> None:
        self._model, self._family, self._layout = module.model, module.family, layout
        self._config: Any = module.model.config
        self._outputs = module.output_names
        self._levels, self._operators = precision == "int8", operators
        # Beside weights in levels, all else is in the precision that "auto" means.
        in_bf16 = precision == "bf16" or (self._levels and cpu_has_bf16())
        self._dtype = torch.bfloat16 if in_bf16 else torch.float32
        self._tensors: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._positions = self._count_positions()
        self._encoder = self._embeddings(module.type_stride)
        self._layers = self._all_layers()

    def save(self, folder: Path, pooling: dict[str, Any] | None, rows: Any) -> None:
        """rows: see `RowOutputs`."""
        description = {
            "pooling": pooling,
            "values": str(self._dtype).removeprefix("torch."),
            "panel": self._operators.panel(),
            "adaptable": self._adaptable(rows),
            "head": [
                self._add(_Part(), "head.", name, one) for name, one in rows.named_parameters() if _is_of_head(name)
            ],
            "sizes": self._sizes,
            "outputs": self._outputs,
            "encoder": vars(self._encoder),
            "layers": [vars(layer) for layer in self._layers],
        }
        save_file(self._tensors, folder / encoder.WEIGHTS, {"description": json.dumps(description)})

    def _adaptable(self, rows: Any) -> dict[str, Any] | None:
        """What adapters may change, see `adapter_cache.lora.batch.Adaptable`; None: nothing."""
        layout = self._layout
        # Those of DeBERTa's queries and keys change its table of places, too.
        if layout.shares_layers or layout.places:
            return None
        layer = self._model.get_submodule(layout.layers)[0]
        targets: list[dict[str, Any]] = []
        for linear, names in enumerate((layout.qkv, (layout.output,), layout.up, (layout.down,))):
            first = 0
            for part, name in enumerate(names):
                outputs, inputs = layer.get_submodule(name).weight.shape
                shape = {"inputs": inputs, "first": first, "outputs": outputs}
                targets.append({"name": name, "linear": linear, "part": part, **shape})
                first += outputs
        prefix = self._model.base_model_prefix
        shapes = [list(parameter.shape) for parameter in rows.head.parameters()] if rows.head_names else []
        return {
            "layers": len(self._layers),
            "paths": [layout.layers, f"{prefix}.{layout.layers}"],
            "targets": targets,
            # Only a head reads what it makes.
            "unused": [] if rows.head_names else ["pooler", f"{prefix}.pooler"],
            "head": dict(zip(rows.head_names, shapes, strict=True)),
        }

    def _count_positions(self) -> int:
        if self._layout.positions and (table := self._part_of(self._model, self._layout.positions)) is not None:
            return int(table.num_embeddings)
        return min(int(self._config.max_position_embeddings), _MOST_POSITIONS)

    def _embeddings(self, type_stride: int) -> _Part:
        layout, part = self._layout, _Part()
        words = self._model.get_submodule(layout.words)
        # Gemma's are scaled by a number of their own.
        table = words.weight * getattr(words, "embed_scale", 1.0)
        if self._levels:
            # In parts: the largest tables have a gigabyte.
            group = self._operators.group()
            quantised = Levels.stacked([quantise(rows, 8, group) for rows in table.split(_ROWS_AT_ONCE)])
            self._add(part, "", "words", quantised.levels)
            self._add(part, "", "word_scales", quantised.scales.flatten())
        else:
            self._add(part, "", "words", table.to(self._dtype))
        for name, path in (("places", layout.positions), ("types", layout.types)):
            if path and (table := self._part_of(self._model, path)) is not None:
                kinds = 2 if type_stride else 1
                weight = table.weight[:kinds] if name == "types" else table.weight
                self._add(part, "", name, weight.float().flatten())
        self._norm(part, "", "norm", self._model, layout.norm)
        self._norm(part, "", "last", self._model, layout.last)
        # Where the embeddings are as wide as the layers, ELECTRA has none.
        if layout.project and (linear := self._part_of(self._model, layout.project)) is not None:
            self._linear(part, "", "project", [linear])
        part.numbers |= {
            "hidden": self._config.hidden_size,
            "positions": self._positions,
            "type_stride": type_stride,
        }
        return part

    def _all_layers(self) -> list[_Part]:
        modules: list[Any] = list(self._model.get_submodule(self._layout.layers))
        if self._layout.shares_layers:
            modules = [layer for group in modules for layer in group.albert_layers]
        parts = [self._layer(f"{number}.", number, layer) for number, layer in enumerate(modules)]
        if not self._layout.shares_layers:
            return parts
        # As transformers spreads them.
        count, inner = self._config.num_hidden_layers, self._config.inner_group_num
        groups = [int(number / (count / self._config.num_hidden_groups)) for number in range(count)]
        return [parts[group * inner + number] for group in groups for number in range(inner)]

    def _layer(self, prefix: str, number: int, layer: Any) -> _Part:
        layout, config, part = self._layout, self._config, _Part()
        linears: list[Any] = [layer.get_submodule(path) for path in layout.qkv]
        heads = int(config.num_attention_heads)
        outputs = [int(linear.weight.shape[0]) for linear in linears]
        dim = outputs[0] // heads if len(outputs) > 1 else outputs[0] // 3 // heads
        kv_heads = outputs[1] // dim if len(outputs) > 1 else heads
        self._linear(part, prefix, "qkv", linears)
        self._linear(part, prefix, "output", [layer.get_submodule(layout.output)])
        ups = [layer.get_submodule(path) for path in layout.up]
        self._linear(part, prefix, "up", ups)
        down = layer.get_submodule(layout.down)
        self._linear(part, prefix, "down", [down])
        for kind, paths in (("pre", layout.pre), ("after", layout.after), ("post", layout.post)):
            for branch, path in zip(("attention", "mlp"), paths, strict=True):
                self._norm(part, prefix, f"{branch}_{kind}", layer, path)
        self._norm(part, prefix, "query_norm", layer, layout.query_norm)
        self._norm(part, prefix, "key_norm", layer, layout.key_norm)
        scale = getattr(layer.get_submodule(layout.scaled), "scaling", None) if layout.scaled else None
        if layout.places:
            scale = self._places(part, prefix, layer.attention.self, heads, dim)
        part.numbers |= {
            "heads": heads,
            "kv_heads": kv_heads,
            "dim": dim,
            "scale": dim**-0.5 if scale is None else float(scale),
            "reach": self._reach(number),
            "causal": int(self._family.causal),
            "inner": int(down.weight.shape[1]),
            "activation": self._activation(),
            "gated": int(layout.gated or len(ups) > 1),
            "rotated": self._rotation(part, number),
            "far": self._distances(part),
        }
        return part

    def _reach(self, number: int) -> int:
        kinds = getattr(self._config, "layer_types", None) or ()
        if number >= len(kinds) or kinds[number] != "sliding_attention":
            return _EVERY_TOKEN
        return int(self._config.sliding_window) - (1 if self._family.counts_itself else 0)

    def _activation(self) -> int:
        name = str(getattr(self._config, self._layout.activation))
        return ACTIVATIONS.index(SAME_ACTIVATION.get(name, name))

    def _rotation(self, part: _Part, number: int) -> int:
        if not self._layout.rotation:
            return 0
        rotation: Any = self._model.get_submodule(self._layout.rotation)
        kind = self._config.layer_types[number] if self._layout.rotation_by_type else ""
        part.tensors |= {"cosines": f"cosines{kind}", "sines": f"sines{kind}"}
        if f"cosines{kind}" not in self._tensors:
            places = torch.arange(self._positions)[None]
            values = rotation(torch.zeros(1), places, *([kind] if kind else []))
            for name, one in zip(("cosines", "sines"), values, strict=True):
                self._tensors[name + kind] = one[0, :, : one.shape[-1] // 2].float().contiguous()
        return 2 * int(self._tensors[f"cosines{kind}"].shape[1])

    def _distances(self, part: _Part) -> int:
        """The bias of each distance, of which there are as many to each side as a text has tokens."""
        if not self._layout.distances:
            return 0
        far = self._positions - 1
        if "bias" not in self._tensors:
            distances = torch.arange(-far, far + 1)
            table: Any = self._model.get_submodule(self._layout.distances)
            buckets = self._model.encoder.relative_position_bucket(distances, num_buckets=table.num_embeddings)
            self._tensors["bias"] = table.weight[buckets].T.float().flatten().contiguous()
        part.tensors["bias"] = "bias"
        return far

    def _places(self, part: _Part, prefix: str, attention: Any, heads: int, dim: int) -> float:
        """DeBERTa's keys and queries of places; returns the scale of scores. See `DisentangledSelfAttention`."""
        encoder: Any = self._model.get_submodule(self._layout.places)
        kinds = {"c2p", "p2c"} & {*attention.pos_att_type}
        scale = 1.0 / math.sqrt(dim * (1 + len(kinds)))
        if not encoder.relative_attention:
            return scale
        span = int(attention.pos_ebd_size)
        embeddings = encoder.get_rel_embedding()[: 2 * span]
        shared = attention.share_att_key
        for name, linear, kind, factor in (("keys", "key", "c2p", 1.0), ("queries", "query", "p2c", scale)):
            project: Any = getattr(attention, f"{linear}_proj" if shared else f"pos_{linear}_proj", None)
            # What a model lacks adds nothing.
            values = factor * project(embeddings) if kind in kinds else torch.zeros(2 * span, heads * dim)
            self._add(part, prefix, f"place_{name}", values.view(-1, heads, dim).transpose(0, 1))
        if "buckets" not in self._tensors:
            self._tensors["buckets"] = self._buckets(attention, span)
        part.tensors["buckets"] = "buckets"
        return scale

    def _buckets(self, attention: Any, span: int) -> torch.Tensor:
        """The bucket of each distance, of which there are as many to each side as a text has tokens."""
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

        far, most = self._positions - 1, int(attention.max_relative_positions)
        distances, bins = torch.arange(-far, far + 1), int(attention.position_buckets)
        if bins > 0 and most > 0:
            distances = make_log_bucket_position(distances, bins, most).long()
        buckets = (distances + span).clamp(0, 2 * span - 1).int()
        if {*buckets.diff().tolist()} - {0, 1}:
            raise UnsupportedError(
                f"position_buckets {bins}, max_relative_positions {most}: provider native computes no distances that "
                "skip a bucket; set provider openvino"
            )
        return buckets

    def _norm(self, part: _Part, prefix: str, name: str, inside: nn.Module, path: str) -> None:
        norm = self._part_of(inside, path) if path else None
        if norm is None:
            return
        weight = norm.weight.float()
        self._add(part, prefix, f"{name}.weight", weight + 1.0 if self._layout.norms_add_one else weight)
        if getattr(norm, "bias", None) is not None:
            self._add(part, prefix, f"{name}.bias", norm.bias.float())
        eps = next(getattr(norm, one) for one in ("eps", "variance_epsilon") if hasattr(norm, one))
        part.numbers |= {f"{name}.eps": eps, f"{name}.centred": int(isinstance(norm, nn.LayerNorm))}

    def _linear(self, part: _Part, prefix: str, name: str, linears: list[Any]) -> None:
        weight = torch.cat([linear.weight for linear in linears])
        if self._levels:
            quantised = quantise(weight, 8, self._operators.group())
            self._add(part, prefix, f"{name}.packed", self._operators.pack_levels(quantised.levels))
            self._add(part, prefix, f"{name}.scales", self._operators.by_panel(quantised.scales))
            self._add(part, prefix, f"{name}.zeros", self._operators.by_panel(quantised.zeros))
        else:
            key = self._add(part, prefix, f"{name}.packed", self._operators.pack(weight.to(self._dtype).contiguous()))
            self._sizes[key] = (int(weight.shape[0]), int(weight.shape[1]))
        if any(linear.bias is not None for linear in linears):
            biases = [torch.zeros(len(one.weight)) if one.bias is None else one.bias.float() for one in linears]
            self._add(part, prefix, f"{name}.bias", torch.cat(biases))

    def _add(self, part: _Part, prefix: str, name: str, tensor: torch.Tensor) -> str:
        part.tensors[name] = prefix + name
        self._tensors[prefix + name] = tensor.contiguous().clone()
        return prefix + name

    @staticmethod
    def _part_of(inside: nn.Module, path: str) -> Any:
        """The module `path` of a model; None where it has none with weights, as ModernBERT before its first layer."""
        try:
            part: Any = inside.get_submodule(path)
        except AttributeError:
            return None
        return part if hasattr(part, "weight") else None
