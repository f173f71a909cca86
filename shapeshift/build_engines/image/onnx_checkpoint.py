"""An ONNX file of a vision transformer as a checkpoint folder: config.json, its processor's file, model.safetensors.

The tensors are the file's initializers, see `onnx_weights`. Positions that an exporter has cut are found where they are
added. The folder's model must answer as the file does, on ONNX Runtime, or the file is refused.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shapeshift import files
from shapeshift.build_engines import onnx_weights
from shapeshift.engines.checkpoint import SINGLE, weight_files
from shapeshift.engines.interfaces import Array
from shapeshift.engines.verify import MIN_COSINE, compare
from shapeshift.errors import EngineError, InvalidInputError, ShapeshiftError, UnsupportedError
from shapeshift.files import HASHES, RememberedHashes
from shapeshift.token_adapt.checkpoints.processors import FILES as PROCESSOR_FILES
from shapeshift.token_adapt.checkpoints.reading import open_vision

if TYPE_CHECKING:
    import onnx

SUFFIX = ".onnx"
_FAMILIES = ("vit", "deit", "dinov2")
_CONFIG = "config.json"
_LABELS = "labels.txt"
_PATCHES = "embeddings.patch_embeddings.projection.weight"
_POSITIONS = "embeddings.position_embeddings"
# Operators through which positions come to their addition; what they read is their first input, a Concat all.
_MOVES = ("Concat", "Reshape", "Transpose", "Resize", "Cast", "Slice", "Identity", "Squeeze", "Unsqueeze")
# transformers 5 names modules in another way than the checkpoints that it writes: patterns, and the names there.
_WRITTEN = {
    r"\blayers\.(\d+)\.mlp\.fc1\.": r"encoder.layer.\1.intermediate.dense.",
    r"\blayers\.(\d+)\.mlp\.fc2\.": r"encoder.layer.\1.output.dense.",
    r"\blayers\.(\d+)\.": r"encoder.layer.\1.",
    r"\battention\.q_proj\.": "attention.attention.query.",
    r"\battention\.k_proj\.": "attention.attention.key.",
    r"\battention\.v_proj\.": "attention.attention.value.",
    r"\battention\.o_proj\.": "attention.output.dense.",
}
# As their authors trained them, where no file beside the ONNX file says so.
_COLOURS = {
    "vit": {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    "dinov2": {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
}
_EDGE = 224


def find(folder: Path) -> Path | None:
    """The ONNX file that a folder without other weights holds; None if there is none.

    Raises InvalidInputError for a folder with several.
    """
    if weight_files(folder):
        return None
    models = sorted(folder.glob(f"*{SUFFIX}"))
    if len(models) > 1:
        raise InvalidInputError("checkpoint", str(folder), f"one ONNX file; name one of {', '.join(map(str, models))}")
    return models[0] if models else None


def as_folder(file: Path, build: Path) -> Path:
    """The checkpoint folder of an ONNX file, in the build folder; made once for a content of the file and those beside.

    Raises InvalidInputError, UnsupportedError or EngineError naming the file, and what it lacks.
    """
    beside = [file.parent / name for name in (_CONFIG, *PROCESSOR_FILES, _LABELS) if (file.parent / name).is_file()]
    hashes = [RememberedHashes(build / HASHES).sha256(file), *map(files.file_sha256, beside)]
    folder = build / "checkpoints" / "from_onnx" / "-".join((file.stem, *(one[:16] for one in hashes)))
    with files.exclusive_lock(build / ".from_onnx.lock"):
        if not folder.is_dir():
            try:
                with files.replace_folder(folder) as work:
                    for one in beside:
                        shutil.copyfile(one, work / one.name)
                    _Writer(file, work).write()
            except ShapeshiftError as error:
                error.args = (f"{file}: {error}",)
                raise
    return folder


class _Writer:
    """Fills the folder `work`, which holds what lies beside the file already. Raises errors without the file's name."""

    def __init__(self, file: Path, work: Path) -> None:
        self._work = work
        self._model = _parse(file)
        graph = self._model.graph
        self._initializers = {one.name: one for one in graph.initializer}
        self._consumers = {name: node for node in reversed(graph.node) for name in node.input}
        self._producers = {name: node for node in graph.node for name in node.output}
        named = onnx_weights.initializers(file, self._model).items()
        # A buffer, or what an exporter computed itself, has whole numbers or a name without a module.
        floats = {name: value for name, value in named if "." in name and value.dtype == np.float32}
        self._tensors = {_written(name): value for name, value in floats.items()}
        self._root = self._find_root()

    def write(self) -> None:
        from safetensors.numpy import save_file

        if (positions := self._root + _POSITIONS) not in self._tensors:
            self._tensors[positions] = self._positions()
        inside = {
            name: np.ascontiguousarray(value)
            for name, value in sorted(self._tensors.items())
            if name.startswith(self._root) or "classifier" in name
        }
        save_file(inside, self._work / SINGLE)
        config_file = self._work / _CONFIG
        is_alone = not config_file.is_file()
        config = {} if is_alone else _read_object(config_file)
        if not is_alone and config.get("model_type") not in _FAMILIES:
            raise UnsupportedError(f"{_CONFIG}: model_type: got {config.get('model_type')!r}; {', '.join(_FAMILIES)}")
        config |= {"image_size": self._trained_size(), **(self._inferred() if is_alone else {})}
        if not any((self._work / name).is_file() for name in PROCESSOR_FILES):
            self._write(PROCESSOR_FILES[0], self._processor(str(config["model_type"])))
        width = self._tensors[self._root + _PATCHES].shape[0]
        # Shapes do not show the number of heads. Published models have 64 numbers a head, with few exceptions.
        sizes = [64, *(size for size in range(8, width) if size != 64)]
        guesses = [{"num_attention_heads": width // size} for size in sizes if not width % size]
        worst = 0.0
        for guess in [{}] if "num_attention_heads" in config else guesses:
            self._write(_CONFIG, config | guess)
            worst = max(worst, cosine := self._cosine())
            if cosine >= MIN_COSINE["f32"]:
                return
        raise EngineError(
            f"the model of these weights differs from the file's own answers: cosine {worst:.6f}, must be at least "
            f"{MIN_COSINE['f32']}; put the checkpoint's config.json beside the file, or use its safetensors"
        )

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        (self._work / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def _find_root(self) -> str:
        """What the names of the image model's tensors begin with."""
        for name in self._tensors:
            if name.endswith(_PATCHES):
                return name.removesuffix(_PATCHES)
        raise UnsupportedError(f"no initializer *{_PATCHES}: ViT, DeiT and DINOv2 with transformers' names are read")

    def _positions(self) -> Array:
        """The positions, which an exporter may have cut into those of the class token and those of the patches."""
        from onnx import numpy_helper

        token = f"{self._root}embeddings.cls_token"
        for node in self._model.graph.node:
            if node.op_type == "Add" and len(node.input) == 2:
                sides = [[*self._sources(name)] for name in node.input]
                for tokens, positions in (sides, sides[::-1]):
                    if token in tokens and positions:
                        parts = [numpy_helper.to_array(self._initializers[name]) for name in positions]
                        return np.concatenate(parts, 1)
        raise InvalidInputError(_POSITIONS, None, "an initializer that is added to the tokens")

    def _sources(self, name: str) -> Iterator[str]:
        """The initializers [1, n, width] that reach `name` and are only moved on the way, in order."""
        if name in self._initializers:
            if len(self._initializers[name].dims) == 3:
                yield name
        elif (node := self._producers.get(name)) is not None and node.op_type in (*_MOVES, "Expand"):
            for one in node.input if node.op_type == "Concat" else node.input[:1]:
                yield from self._sources(one)

    def _trained_size(self) -> int:
        """The edge of the images that the positions are for; at most two tokens before the patches have one."""
        count, patch = self._tensors[self._root + _POSITIONS].shape[-2], self._tensors[self._root + _PATCHES].shape[-1]
        return int(math.isqrt(count - 1) * patch)

    def _inferred(self) -> dict[str, Any]:
        """The fields of config.json that the tensors show."""
        scaled = f"{self._root}encoder.layer.0.layer_scale1.lambda1" in self._tensors
        return {"model_type": "dinov2" if scaled else "vit"}

    def _processor(self, model_type: str) -> dict[str, Any]:
        """Whole square images of the size of the graph's input, in the family's colours."""
        size = self._input_size() or _EDGE
        colours = _COLOURS["dinov2" if model_type == "dinov2" else "vit"]
        square = {"height": size, "width": size}
        edges = {"size": {"shortest_edge": size}, "do_center_crop": True, "crop_size": square}
        return {"image_processor_type": "BitImageProcessor", "resample": 3, **edges, **colours}

    def _input_size(self) -> int:
        """The edge of the images that the graph takes; 0: any."""
        inputs = [one for one in self._model.graph.input if one.name not in self._initializers]
        sizes = [one.dim_value for one in inputs[0].type.tensor_type.shape.dim] if len(inputs) == 1 else []
        if len(sizes) != 4 or sizes[2] != sizes[3]:
            raise UnsupportedError("its input must be one tensor of square images [images, 3, size, size]")
        return int(sizes[2])

    def _cosine(self) -> float:
        """Of the folder's features with those of the file, for an image of noise."""
        # Both take seconds to import.
        from shapeshift.token_adapt.checkpoints.weights import read_described
        from shapeshift.token_adapt.model.gamma_module import GammaModule

        described = open_vision(self._work)[1]
        architecture = described.architecture
        if self._input_size() not in (0, architecture.image_size):
            raise InvalidInputError(
                "size of the images", architecture.image_size, f"{self._input_size()}, as the graph takes"
            )
        module = GammaModule(read_described(self._work, described)[0], 0).eval()
        inputs = module.example(1)
        mean, std = np.array(architecture.mean, np.float32), np.array(architecture.std, np.float32)
        tokens = self._encoded(((inputs["PIXELS"] / np.float32(255) - mean) / std).transpose(0, 3, 1, 2))
        parts = [tokens[:, : architecture.pooled].reshape(1, -1)]
        if architecture.pooled_patches:
            parts.append(tokens[:, architecture.prefix :].mean(1))
        return compare(module.features(inputs), np.concatenate(parts, 1)).min_cosine

    def _encoded(self, images: Array) -> Array:
        """The file's own tokens after the last norm [images, tokens, width]."""
        import onnx
        import onnxruntime

        encoder = onnx.ModelProto()
        encoder.CopyFrom(self._model)
        graph = encoder.graph
        names = [one.name for one in graph.input if one.name not in self._initializers]
        output = self._consumers[f"{self._root}layernorm.bias"].output[0]
        del graph.output[:]
        graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None))
        try:
            session = onnxruntime.InferenceSession(encoder.SerializeToString(), providers=["CPUExecutionProvider"])
            tokens: Array = session.run([output], {names[0]: images})[0]
        except Exception as error:  # noqa: BLE001  the library's errors have no common class
            raise InvalidInputError("graph", str(error).partition("\n")[0], "one that ONNX Runtime runs") from None
        return tokens


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError(file.name, "no JSON", f"JSON ({error})") from None
    if not isinstance(content, dict):
        raise InvalidInputError(file.name, content, "a JSON object")
    return content


def _written(name: str) -> str:
    """The name of a tensor as a checkpoint has it."""
    for pattern, written in _WRITTEN.items():
        name = re.sub(pattern, written, name)
    return name


def _parse(file: Path) -> onnx.ModelProto:
    """The model in `file`, whose weights are f32 in the file itself. Raises InvalidInputError or UnsupportedError."""
    try:
        import onnx
    except ImportError:
        raise EngineError("reading ONNX needs the package onnx; run `pip install onnx onnxruntime`") from None
    try:
        model = onnx.load(str(file), load_external_data=False)
    except Exception as error:  # noqa: BLE001  protobuf's errors have no common class
        raise InvalidInputError("ONNX", str(error), "a whole ONNX file; download it again") from None
    if not model.graph.node or not model.opset_import:
        raise InvalidInputError("ONNX", "no graph", "a whole ONNX file; download it again")
    for one in model.graph.initializer:
        if one.data_location == one.EXTERNAL:
            raise UnsupportedError(f"{one.name} is in another file; save all in one, with onnx.save_model")
        if len(one.dims) > 1 and one.data_type != one.FLOAT:
            kind = onnx.TensorProto.DataType.Name(one.data_type)
            raise UnsupportedError(f"{one.name} is {kind}; FLOAT is read: use the file that is not quantised")
    return model
