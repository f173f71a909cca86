"""What is to be built for one front model, with everything `auto` resolved."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from build_engines import edges
from build_engines.settings import FrontModel, Places, read_json
from shapeshift.engines import heads, manifest, precision, registry
from shapeshift.engines.checkpoint import Checkpoint, file_sha256, find, open_checkpoint
from shapeshift.engines.hardware import cpu_model
from shapeshift.engines.protocol import Provider
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError
from shapeshift.serving.text_inputs import ENGINE_MS, OFFSETS, TEXT_PAIR
from shapeshift.triton import modelconfig

# Raised whenever a change of ours makes engines that were built before it wrong or worse.
_BUILD_FORMAT = 5
# Outputs that no engine computes.
_OF_THE_FRONT: dict[str, tuple[str, tuple[int, ...]]] = {
    OFFSETS: ("TYPE_INT32", (-1, 2)),
    ENGINE_MS: ("TYPE_FP32", (1,)),
}


@dataclass(frozen=True)
class Plan:
    """A front model, its checkpoint, and the provider and precision to build with; `head`: a file, where it has one."""

    front: FrontModel
    checkpoint: Checkpoint
    provider: Provider
    precision: str
    head: Path | None = None

    @property
    def source_sha256(self) -> str:
        """The hash of what the engines compute: the checkpoint, or the part of it and the head that are taken."""
        layers = self.front.settings.layers
        if not layers and self.head is None:
            return self.checkpoint.sha256
        parts = [self.checkpoint.sha256, str(layers), file_sha256(self.head) if self.head else ""]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of what LOGITS tells apart."""
        return heads.labels_of_head(self.head) if self.head else heads.labels_of_config(self.checkpoint.config)

    @property
    def engine_outputs(self) -> tuple[str, ...]:
        """Those of the outputs in config.pbtxt that engines compute, in their order."""
        return tuple(output.name for output in self.front.config.output if output.name not in _OF_THE_FRONT)

    @property
    def pairs(self) -> bool:
        """Whether texts may come in pairs."""
        return any(tensor.name == TEXT_PAIR for tensor in self.front.config.input)

    def key(self) -> str:
        """Changes when, and only when, the engines must be built again."""
        inputs: dict[str, Any] = {
            "format": _BUILD_FORMAT,
            "settings": asdict(self.front.settings),
            "histogram": edges.length_histogram(self.front),
            "outputs": [[output.name, list(output.dims)] for output in self.front.config.output],
            "pairs": self.pairs,
            "checkpoint": self.source_sha256,
            "provider": [self.provider.name, self.provider.version()],
            "precision": self.precision,
            "hardware": cpu_model(),
        }
        if self.front.settings.profile_file:
            inputs["profile"] = read_json(self.front.folder / self.front.settings.profile_file, "profile_file")
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def plan(front: FrontModel, places: Places) -> Plan:
    """Resolve checkpoint, provider and precision. Raises the errors of `shapeshift.errors`."""
    settings = front.settings
    checkpoint = open_checkpoint(find(settings.checkpoint, places.checkpoints))
    provider = registry.provider(registry.resolve(settings.provider))
    on_gpu = provider.name == "tensorrt"
    # ONNX Runtime's CPU kernels know no bf16.
    stated = "f32" if settings.precision == "auto" and provider.name == "onnxruntime" else settings.precision
    head = find_head(settings.head, places) if settings.head else None
    return Plan(front, checkpoint, provider, precision.resolve(stated, on_gpu), head)


def find_head(name: str, places: Places) -> Path:
    """The file of that name: a path, or below the folders where checkpoints are. Raises NotFoundError."""
    candidates = [Path(name), *(place / name for place in places.checkpoints)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise NotFoundError(f"head: no file {', '.join(map(str, candidates))}")


def is_current(planned: Plan, folder: Path) -> bool:
    """Whether `folder` already holds just what `planned` would build, whole."""
    try:
        found = manifest.load(folder)
        found.check_files(folder)
    except EngineError:
        return False
    return found.build_key == planned.key()


def output_dims(planned: Plan, hidden: int) -> dict[str, tuple[int, ...]]:
    """The outputs that engines of this plan can have: their dims without the row axis, -1 for one value a token."""
    return {"EMBEDDING": (hidden,), "LOGITS": (len(planned.labels),), "IMPORTANCE": (-1,)}


def check_outputs(planned: Plan, dims: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Those of `dims` that config.pbtxt lists; InvalidInputError where it lists others, or with other dims."""
    offered = {name: ("TYPE_FP32", own) for name, own in dims.items()} | _OF_THE_FRONT
    for output in planned.front.config.output:
        if output.name not in offered:
            raise InvalidInputError("output", output.name, f"one of {', '.join(offered)}")
        kind, own = offered[output.name]
        wanted = f"data_type: {kind} dims: [ {', '.join(map(str, own))} ] for this checkpoint"
        if list(output.dims) != list(own) or modelconfig.type_name(output) != kind:
            raise InvalidInputError(f"output {output.name}", [modelconfig.type_name(output), *output.dims], wanted)
    if not planned.engine_outputs:
        raise InvalidInputError("output", [], f"at least one of {', '.join(dims)}")
    return {name: dims[name] for name in planned.engine_outputs}
