"""The tensors of each library's vision transformers, under the names of `UnifiedViT`.

A module has a weight and usually a bias. Several of theirs are stacked to one of ours: query, key and value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

Shapes = Mapping[str, tuple[int, ...]]
Modules = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class TensorNames:
    """Where a library keeps what `UnifiedViT` needs; names are relative to the model inside its checkpoint.

    patch     the convolution that embeds patches
    position  positions of the tokens [1, n, width] or [n, width]; empty: there are none
    tokens    tensors of the tokens before the patches, in their order
    block     what the names of block {} begin with
    parts     modules of a block; a name with {} stands for the parameter's name where that is no suffix
    scales    tensors of a block: the two scales of its residual branches
    outer     modules outside the blocks
    query     tensor of the query of an attention pool
    unused    beginnings of names that the features do not need
    unbiased  modules of a block that may lack a bias where those beside them have one
    """

    patch: str
    position: str
    tokens: tuple[str, ...]
    block: str
    parts: Modules
    scales: tuple[str, str] | None
    outer: Modules
    query: str = ""
    unused: tuple[str, ...] = ()
    unbiased: tuple[str, ...] = ()

    def pairs(self, depth: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each parameter of ours with theirs; not those of the patch embedding, the prefix and the positions."""
        for ours, theirs in self.outer.items():
            yield from _parameters(ours, theirs)
        if self.query:
            yield "pool.query", (self.query,)
        for index in range(depth):
            begin = self.block.format(index)
            for ours, theirs in self.parts.items():
                for name, sources in _parameters(ours, theirs):
                    yield f"blocks.{index}.{name}", tuple(begin + one for one in sources)
            for branch, scale in enumerate(self.scales or (), 1):
                yield f"blocks.{index}.scale{branch}", (begin + scale,)

    def depth(self, shapes: Shapes) -> int:
        """The number of blocks."""
        before = self.block.split("{}")[0]
        numbers = [name.removeprefix(before).split(".")[0] for name in shapes if name.startswith(before)]
        return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)

    def ours(self, shapes: Shapes) -> Shapes:
        """The shapes of `pairs` that the checkpoint has all parts of, by our names."""
        shapes_of = {}
        for name, theirs in self.pairs(self.depth(shapes)):
            present = [one for one in theirs if one in shapes]
            if present and all(one in shapes or self.is_zero(one) for one in theirs):
                first = shapes[present[0]]
                rows = sum(shapes.get(one, first)[0] for one in theirs)
                shapes_of[name] = (rows, *first[1:]) if len(theirs) > 1 else first
        return shapes_of

    def is_zero(self, name: str) -> bool:
        """Whether a checkpoint that lacks this tensor means zeros."""
        return name.endswith(tuple(f".{module}.bias" for module in self.unbiased))

    def unknown(self, shapes: Shapes) -> list[str]:
        """The tensors that this description does not mention."""
        named = {one for _, theirs in self.pairs(self.depth(shapes)) for one in theirs}
        named |= {f"{self.patch}.weight", f"{self.patch}.bias", self.position, *self.tokens}
        return sorted(name for name in shapes if name not in named and not name.startswith(self.unused))


def _parameters(ours: str, theirs: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for kind in ("weight", "bias"):
        yield f"{ours}.{kind}", tuple(one.format(kind) if "{}" in one else f"{one}.{kind}" for one in theirs)


def _same(*names: str) -> Modules:
    return {name: (name,) for name in names}


TIMM = TensorNames(
    patch="patch_embed.proj",
    position="pos_embed",
    tokens=("cls_token", "dist_token", "reg_token"),
    block="blocks.{}.",
    parts={
        **_same("norm1", "norm2", "mlp.fc1", "mlp.fc2"),
        "attention.qkv": ("attn.qkv",),
        "attention.q_norm": ("attn.q_norm",),
        "attention.k_norm": ("attn.k_norm",),
        "attention.proj": ("attn.proj",),
    },
    scales=("ls1.gamma", "ls2.gamma"),
    outer={
        **_same("norm_pre", "norm", "fc_norm"),
        "pool.qkv": ("attn_pool.q", "attn_pool.kv"),
        "pool.proj": ("attn_pool.proj",),
        "pool.norm": ("attn_pool.norm",),
        "pool.mlp.fc1": ("attn_pool.mlp.fc1",),
        "pool.mlp.fc2": ("attn_pool.mlp.fc2",),
    },
    query="attn_pool.latent",
)

_VIT_ATTENTION: Modules = {
    "attention.qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "attention.proj": ("attention.output.dense",),
}
# The pooler of transformers' ViT and DeiT is an activation over the class token that their classifiers do not use.
VIT = TensorNames(
    patch="embeddings.patch_embeddings.projection",
    position="embeddings.position_embeddings",
    tokens=("embeddings.cls_token", "embeddings.distillation_token"),
    block="encoder.layer.{}.",
    parts={
        **_VIT_ATTENTION,
        "norm1": ("layernorm_before",),
        "norm2": ("layernorm_after",),
        "mlp.fc1": ("intermediate.dense",),
        "mlp.fc2": ("output.dense",),
    },
    scales=None,
    outer={"norm": ("layernorm",)},
    unused=("pooler.", "embeddings.mask_token"),
)
DINOV2 = TensorNames(
    patch="embeddings.patch_embeddings.projection",
    position="embeddings.position_embeddings",
    tokens=("embeddings.cls_token", "embeddings.register_tokens"),
    block="encoder.layer.{}.",
    parts={**_VIT_ATTENTION, **_same("norm1", "norm2", "mlp.fc1", "mlp.fc2")},
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    outer={"norm": ("layernorm",)},
    unused=("embeddings.mask_token",),
)
# It rotates by place instead of adding positions, and its keys have no bias.
DINOV3 = replace(
    DINOV2,
    patch="embeddings.patch_embeddings",
    position="",
    block="layer.{}.",
    parts={
        **_same("norm1", "norm2"),
        "attention.qkv": tuple(f"attention.{part}_proj" for part in ("q", "k", "v")),
        "attention.proj": ("attention.o_proj",),
        "mlp.fc1": ("mlp.up_proj",),
        "mlp.fc2": ("mlp.down_proj",),
    },
    outer=_same("norm"),
    unbiased=("q_proj", "k_proj", "v_proj"),
)
DINOV3_GATED = replace(DINOV3, parts={**DINOV3.parts, "mlp.fc1": ("mlp.gate_proj", "mlp.up_proj")})
DINOV2_GATED = replace(DINOV2, parts={**DINOV2.parts, "mlp.fc1": ("mlp.weights_in",), "mlp.fc2": ("mlp.weights_out",)})
CLIP = TensorNames(
    patch="embeddings.patch_embedding",
    position="embeddings.position_embedding.weight",
    tokens=("embeddings.class_embedding",),
    block="encoder.layers.{}.",
    parts={
        **_same("mlp.fc1", "mlp.fc2"),
        "norm1": ("layer_norm1",),
        "norm2": ("layer_norm2",),
        "attention.qkv": tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v")),
        "attention.proj": ("self_attn.out_proj",),
    },
    scales=None,
    # The misspelling is theirs.
    outer={"norm_pre": ("pre_layrnorm",), "norm": ("post_layernorm",)},
    unused=("embeddings.position_ids",),
)
SIGLIP = replace(
    CLIP,
    tokens=(),
    outer={
        "norm": ("post_layernorm",),
        "pool.qkv": ("head.attention.in_proj_{}",),
        "pool.proj": ("head.attention.out_proj",),
        "pool.norm": ("head.layernorm",),
        "pool.mlp.fc1": ("head.mlp.fc1",),
        "pool.mlp.fc2": ("head.mlp.fc2",),
    },
    query="head.probe",
)
