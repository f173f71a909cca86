"""Checkpoints of transformers' vision models: each family's configuration, tensors and pooling, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.checkpoints.description import (
    Classifier,
    Description,
    require_positions,
    require_stated,
    sizes,
    square_edge,
    table,
)
from shapeshift.token_adapt.checkpoints.labels import read_labels
from shapeshift.token_adapt.checkpoints.processors import read_processor
from shapeshift.token_adapt.checkpoints.tensor_names import (
    CLIP,
    DINOV2,
    DINOV2_GATED,
    DINOV3,
    DINOV3_GATED,
    SIGLIP,
    VIT,
    Shapes,
    TensorNames,
)
from shapeshift.token_adapt.model.architecture import Architecture

Fields = Mapping[str, Any]

_PATCHES: Fields = {"pooled": 0, "pooled_patches": True}
# The classifiers by their modules, and the number of tokens that these read.
_HEADS: Mapping[tuple[str, ...], Fields] = {
    ("classifier",): {"pooled": 1},
    ("cls_classifier", "distillation_classifier"): {"pooled": 2},
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


@dataclass(frozen=True)
class Family:
    """The models of a `model_type`.

    name         as their authors write it
    names        of the tensors; the first whose tensors a checkpoint has
    processor    the class of the image processor where the checkpoint names none
    epsilon      where the configuration states none, as `activation`
    pooling      fields of `Architecture` for the features of a checkpoint without classifier; none: the first token;
    classified   and of one with a classifier; where it sets attention_pool or norm_final to False, the tensors of
                 these are in the checkpoint and not used
    projection   tensor of the projection of the features, outside the vision model, and its fields
    rope         of `Architecture`, where the configuration states none
    any_size     positions are interpolated to the processor's size, as the library does; antialias: smoothed
    """

    name: str
    names: tuple[TensorNames, ...]
    processor: str
    epsilon: float
    activation: str = "gelu"
    pooling: Fields = field(default_factory=dict)
    classified: Fields = field(default_factory=dict)
    projection: str = ""
    rope: float = 0.0
    any_size: bool = False
    antialias: bool = False


_DINOV2_POOLING: Fields = {"pooled": 1, "pooled_patches": True}
_DINOV2 = (DINOV2, DINOV2_GATED)
FAMILIES: dict[str, Family] = {
    "vit": Family("ViT", (VIT,), "ViT", 1e-12),
    "deit": Family("DeiT", (VIT,), "DeiT", 1e-12),
    "dinov2": Family("DINOv2", _DINOV2, "Bit", 1e-6, classified=_DINOV2_POOLING, any_size=True),
    "dinov2_with_registers": Family(
        "DINOv2 with registers", _DINOV2, "Bit", 1e-6, classified=_DINOV2_POOLING, any_size=True, antialias=True
    ),
    "dinov3_vit": Family("DINOv3", (DINOV3_GATED, DINOV3), "DINOv3ViT", 1e-5, rope=100.0, any_size=True),
    "clip": Family(
        "CLIP",
        (CLIP,),
        "CLIP",
        1e-5,
        activation="quick_gelu",
        classified={**_PATCHES, "norm_final": False},
        projection="visual_projection",
    ),
    "siglip": Family(
        "SigLIP",
        (SIGLIP,),
        "Siglip",
        1e-6,
        activation="gelu_pytorch_tanh",
        pooling={"pooled": 0},
        classified={**_PATCHES, "attention_pool": False},
    ),
}
# The image tower alone has a type of its own.
_TOWERS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises UnsupportedError naming those that are served."""
    model_type = config.get("model_type")
    family = FAMILIES.get(_TOWERS.get(str(model_type), str(model_type)))
    if family is None:
        raise UnsupportedError(
            f"config.json: model_type: got {model_type!r}; supported: timm's vit_* and deit*, and {', '.join(FAMILIES)}"
        )
    return family


def describe(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> Description:
    """The checkpoint in `folder`. Raises InvalidInputError or UnsupportedError naming the file and the field."""
    family = family_of(config)
    vision = table(config, "vision_config") if "vision_config" in config else config
    names, root = _place(family, shapes)
    heads = next((heads for heads in _HEADS if all(f"{one}.weight" in shapes for one in heads)), ())
    trained_size = square_edge("config.json: image_size", vision.get("image_size", 224))
    processor = read_processor(folder, family.processor)
    size = processor.preprocessing.size
    if size != trained_size and not family.any_size:
        allowed = f"{trained_size}, image_size in config.json; take both files from one checkpoint"
        raise InvalidInputError(f"{processor.file}: size of the images", size, allowed)
    # The projection is for the features without a classifier, which has its own pooling.
    outside = "" if heads or f"{family.projection}.weight" not in shapes else family.projection
    inner = {name.removeprefix(root): shape for name, shape in shapes.items() if name.startswith(root)}
    measures = sizes(names, inner)
    if outside:
        measures["projection"] = shapes[f"{outside}.weight"][0]
    fields = {"patch_size": "patch_size", "num_hidden_layers": "depth", "hidden_size": "width"}
    require_stated(vision, {name: measures[ours] for name, ours in fields.items()})
    pooling = family.classified if heads else family.pooling
    architecture = Architecture(
        image_size=size,
        heads=_num_heads(vision),
        epsilon=float(vision.get("layer_norm_eps", family.epsilon)),
        activation=_activation(vision, family, measures["gated"]),
        rope=float(vision.get("rope_theta", family.rope)) if family.rope else 0.0,
        mean=processor.mean,
        std=processor.std,
        **{**measures, **_HEADS.get(heads, {}), **pooling},
    )
    require_positions(names, inner, architecture, trained_size)
    return Description(
        family=family.name,
        architecture=architecture,
        preprocessing=processor.preprocessing,
        names=names,
        root=root,
        classifier=_classifier(folder, config, heads, shapes),
        trained_size=trained_size,
        antialias=family.antialias,
        projection=outside,
    )


def _num_heads(vision: Mapping[str, Any]) -> int:
    heads = vision.get("num_attention_heads", 12)
    if not isinstance(heads, int):
        raise InvalidInputError("config.json: num_attention_heads", heads, "a whole number")
    return heads


def _activation(vision: Mapping[str, Any], family: Family, gated: bool) -> str:
    activation = str(vision.get("hidden_act", family.activation))
    if gated and family.rope:
        if activation != "silu":
            raise UnsupportedError(f"config.json: hidden_act: got {activation!r}; silu, with use_gated_mlp")
        # Nothing reads it.
        return family.activation
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(f"config.json: hidden_act: got {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _place(family: Family, shapes: Shapes) -> tuple[TensorNames, str]:
    """How the tensors of the image model are called, and what their names begin with."""
    for names in family.names:
        # The widest layer of the first block tells the variants of a family apart.
        tensor = names.block.format(0) + names.parts["mlp.fc1"][0] + ".weight"
        for name in shapes:
            if name.endswith(tensor) and not name.startswith("text_model."):
                return names, name.removesuffix(tensor)
    tensor = family.names[0].block.format(0) + family.names[0].parts["mlp.fc1"][0] + ".weight"
    raise InvalidInputError(
        f"checkpoint: {tensor}", None, f"this tensor of {family.name} is missing; download it again"
    )


def _classifier(folder: Path, config: Mapping[str, Any], heads: tuple[str, ...], shapes: Shapes) -> Classifier | None:
    if not heads:
        return None
    problem = config.get("problem_type")
    if problem not in (None, "single_label_classification"):
        raise UnsupportedError(f"config.json: problem_type: got {problem!r}; single_label_classification is served")
    count = shapes[f"{heads[0]}.weight"][0]
    return Classifier(heads, read_labels(folder, config.get("id2label"), "id2label", count, "LABEL_{}"))
