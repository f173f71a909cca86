"""What a checkpoint of a vision transformer holds, known before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shapeshift.errors import InvalidInputError, UnsupportedError
from shapeshift.token_adapt.checkpoints.tensor_names import Shapes, TensorNames
from shapeshift.token_adapt.model.architecture import Architecture
from shapeshift.token_adapt.model.manifest import Preprocessing


@dataclass(frozen=True)
class Classifier:
    """The checkpoint's own classifier over the features.

    heads   its linear layers by the names of their tensors; it is their mean, each over its own pooled token
    labels  of its outputs
    """

    heads: tuple[str, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """A checkpoint that can be served.

    family        as its authors call it
    names, root   its tensors, and what their names begin with
    trained_size  edge of the images that its positions are for; those of another edge are interpolated
    antialias     the interpolation smooths
    projection    module of the projection of the features, if it is outside the image model
    """

    family: str
    architecture: Architecture
    preprocessing: Preprocessing
    names: TensorNames
    root: str
    classifier: Classifier | None
    trained_size: int
    antialias: bool = False
    projection: str = ""


def repooled(described: Description, pooling: str) -> Description:
    """The checkpoint with features as the setting `pooling` says. Raises InvalidInputError where they are fixed."""
    if pooling == "auto":
        return described
    architecture = described.architecture
    fixed = described.classifier is not None or architecture.projection or architecture.attention_pool
    if fixed or ("cls" in pooling and not architecture.prefix):
        reads = "its classifier" if described.classifier else "its projection or attention pool"
        allowed = f"auto: {reads} reads the tokens" if fixed else "auto or mean: the model has no class token"
        raise InvalidInputError("pooling", pooling, allowed)
    of_class, of_patches = "cls" in pooling, "mean" in pooling
    return replace(described, architecture=replace(architecture, pooled=int(of_class), pooled_patches=of_patches))


def sizes(names: TensorNames, shapes: Shapes) -> dict[str, Any]:
    """The fields of `Architecture` that shapes show. Raises InvalidInputError or UnsupportedError naming a tensor."""
    if len(shapes.get(f"{names.patch}.weight", ())) != 4:
        raise UnsupportedError(f"checkpoint: no tensor {names.patch}.weight with 4 axes; a vision transformer has one")
    width, channels, patch_size, side = shapes[f"{names.patch}.weight"]
    if channels != 3 or side != patch_size:
        raise UnsupportedError(
            f"checkpoint: {names.patch}.weight has {channels} channels and patches of {patch_size} x {side}; "
            "must be 3 channels and square patches"
        )
    unknown = names.unknown(shapes)
    if unknown:
        raise UnsupportedError(f"checkpoint: unknown tensors, which no model that is served has: {unknown[:3]}")
    ours, depth = names.ours(shapes), names.depth(shapes)
    _check_blocks(names, shapes, depth)
    fc2 = ours.get("blocks.0.mlp.fc2.weight")
    if fc2 is None or len(fc2) != 2:
        raise InvalidInputError("checkpoint: the second layer of the first MLP", fc2, "a tensor with 2 axes")
    prefix = [shapes[name] for name in names.tokens if name in shapes]
    return {
        "patch_size": patch_size,
        "width": width,
        "depth": depth,
        "mlp_width": fc2[1],
        "prefix": sum(shape[1] if len(shape) == 3 else 1 for shape in prefix),
        "attention_pool": "pool.qkv.weight" in ours,
        "qkv_bias": "blocks.0.attention.qkv.bias" in ours,
        "qk_norm": "blocks.0.attention.q_norm.weight" in ours,
        "norm_pre": "norm_pre.weight" in ours,
        "norm_final": "norm.weight" in ours,
        "norm_pooled": "fc_norm.weight" in ours,
        "layer_scale": "blocks.0.scale1" in ours,
        "gated": ours.get("blocks.0.mlp.fc1.weight", (0,))[0] == 2 * fc2[1],
        "projection": ours.get("projection.weight", (0,))[0],
        "projection_bias": "projection.bias" in ours,
    }


def require_positions(names: TensorNames, shapes: Shapes, architecture: Architecture, trained_size: int) -> None:
    """Raise InvalidInputError unless there is a position for each patch, and one for no, some or all other tokens.

    A model that rotates by place has none.
    """
    if not names.position:
        return
    shape = shapes.get(names.position, (0, 0))
    positions, patches = shape[-2], (trained_size // architecture.patch_size) ** 2
    if not patches <= positions <= patches + architecture.prefix:
        allowed = f"{patches} or {patches + architecture.prefix} positions for images of size {trained_size}"
        raise InvalidInputError(f"checkpoint: {names.position}", positions, allowed)


def require_stated(config: Mapping[str, Any], shown: Mapping[str, int]) -> None:
    """Raise InvalidInputError for the first field that states another number than the tensors show."""
    for name, number in shown.items():
        if config.get(name) not in (None, number, [number, number]):
            raise InvalidInputError(f"config.json: {name}", config[name], f"{number}, as the tensors show")


def square_edge(field: str, value: Any) -> int:
    """The edge of square images, from a number or several equal ones. Raises InvalidInputError naming the field."""
    edges = set(value) if isinstance(value, list | tuple) else {value}
    edge = edges.pop() if edges else None
    if edges or not isinstance(edge, int) or edge < 1:
        raise InvalidInputError(field, value, "one whole number of at least 1: images must be square")
    return edge


def three_numbers(field: str, values: Any) -> tuple[float, float, float]:
    """A number for each colour. Raises InvalidInputError naming the field."""
    valid = (
        isinstance(values, list | tuple) and len(values) == 3 and all(isinstance(one, int | float) for one in values)
    )
    if not valid or ("std" in field and min(values) <= 0):
        raise InvalidInputError(field, values, "three numbers, for red, green and blue; std above 0")
    return float(values[0]), float(values[1]), float(values[2])


def table(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A JSON object in another one; empty where it is not stated. Raises InvalidInputError naming the field."""
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise InvalidInputError(field, value, "a JSON object")
    return value


def _check_blocks(names: TensorNames, shapes: Shapes, depth: int) -> None:
    """Raise InvalidInputError for the first tensor that a block lacks or that has another shape than in block 0."""
    first = names.block.format(0)
    for name, shape in shapes.items():
        if not name.startswith(first):
            continue
        for index in range(1, depth):
            other = names.block.format(index) + name.removeprefix(first)
            if other not in shapes:
                raise InvalidInputError(f"checkpoint: {other}", None, "this tensor is missing; download it again")
            if shapes[other] != shape:
                raise InvalidInputError(f"checkpoint: {other}", shapes[other], f"shape {shape}, as in the first block")
