"""Models of random weights, made in memory: no checkpoint is read, nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from bench.gpu.device import DTYPES, Device
from shapeshift.engines.text.export_module import PackedEncoder
from shapeshift.engines.text.families import FAMILIES
from shapeshift.engines.text.pooling import SentenceHead, TokenVectors
from shapeshift.engines.text.sentence_modules import SentenceModules
from shapeshift.fused_decode.interfaces import blocks_of
from shapeshift.fused_decode.model.architecture import Architecture, from_config
from shapeshift.fused_decode.model.assembly import LinearMakers, assemble
from shapeshift.fused_decode.model.cuda_runtime import GraphedModel
from shapeshift.fused_decode.model.kv_cache import KeyValueCache
from shapeshift.fused_decode.model.tensor_layout import linears, shapes
from shapeshift.fused_decode.model.torch_operations import PLAIN, PlainLinear
from shapeshift.fused_decode.model.weights import WeightFiles

Shape = Mapping[str, Any]
"""Fields of a transformers configuration."""
_STD = 0.02


def encoder(shape: Shape, seed: int) -> PackedEncoder:
    """A BERT with mean pooling, as engines are exported from, in f32 on the CPU."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    model: Any = BertModel(BertConfig(**shape), add_pooling_layer=False)
    modules = SentenceModules(("mean",), True)
    return PackedEncoder(model.eval(), FAMILIES["bert"], SentenceHead(modules), TokenVectors(modules, 0, ())).eval()


def on_device(module: PackedEncoder, device: Device, precision: str) -> PackedEncoder:
    """A copy of `module` on the device, in that precision."""
    copied = copy.deepcopy(module).to(device.torch_device)
    return copied if precision == "f32" else copied.cast(DTYPES[precision])


class RandomWeights(WeightFiles):
    """Tensors of the shapes of an architecture, drawn on the device when they are read; none is packed."""

    def __init__(self, architecture: Architecture, device: Device, seed: int) -> None:
        self._architecture = architecture
        self._shapes = shapes(architecture)
        self._device = device.torch_device
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self._device)
        return self._drawn(shape, dtype)

    def linear(self, layer: int, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = linears(self._architecture)[name]
        return self._drawn((sum(shape.outputs), shape.inputs), dtype), None

    def _drawn(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        drawn = torch.empty(shape, dtype=dtype, device=self._device)
        return drawn.normal_(std=_STD, generator=self._generator)


def architecture_of(shape: Shape) -> Architecture:
    """A Llama of this shape."""
    from transformers import LlamaConfig

    return from_config(LlamaConfig(**shape).to_dict())


def decoder(shape: Shape, device: Device, slots: int, max_length: int, seed: int, extra: int = 0) -> GraphedModel:
    """A Llama of this shape with a cache for `slots` texts, and `extra` elements behind it."""
    architecture, dtype = architecture_of(shape), device.dtype
    blocks = slots * blocks_of(max_length)
    cache = KeyValueCache(
        architecture, slots, max_length, dtype, blocks=blocks, device=str(device.torch_device), extra_elements=extra
    )
    weights = RandomWeights(architecture, device, seed)
    return GraphedModel(
        assemble(architecture, weights, cache, dtype, LinearMakers(PlainLinear, PlainLinear, dtype)), cache
    )


def gathering(model: GraphedModel) -> GraphedModel:
    """The same weights and cache, with attention in plain torch: over a copy of the keys and values of all places."""
    return GraphedModel(model.network, model.cache, PLAIN)


def reference_decoder(shape: Shape, device: Device, seed: int) -> Any:
    """The same shape by transformers, with weights of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    with torch.device(device.torch_device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(device.dtype)
        try:
            model: Any = LlamaForCausalLM(LlamaConfig(**shape))
        finally:
            torch.set_default_dtype(before)
    return model.eval()
