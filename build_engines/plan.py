"""What is to be built for one front model, with everything `auto` resolved."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from build_engines import edges
from build_engines.settings import FrontModel, Places, read_json
from shapeshift.engines import manifest, precision, registry
from shapeshift.engines.checkpoint import Checkpoint, find, open_checkpoint
from shapeshift.engines.hardware import cpu_model
from shapeshift.engines.protocol import Provider
from shapeshift.errors import EngineError, InvalidInputError

# Raised whenever a change of ours makes engines that were built before it wrong or worse.
_BUILD_FORMAT = 5


@dataclass(frozen=True)
class Plan:
    """A front model, its checkpoint, and the provider and precision to build with."""

    front: FrontModel
    checkpoint: Checkpoint
    provider: Provider
    precision: str

    def key(self) -> str:
        """Changes when, and only when, the engines must be built again."""
        inputs: dict[str, Any] = {
            "format": _BUILD_FORMAT,
            "settings": asdict(self.front.settings),
            "histogram": edges.length_histogram(self.front),
            "outputs": [[output.name, list(output.dims)] for output in self.front.config.output],
            "checkpoint": self.checkpoint.sha256,
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
    return Plan(front, checkpoint, provider, precision.resolve(stated, on_gpu))


def is_current(planned: Plan, folder: Path) -> bool:
    """Whether `folder` already holds just what `planned` would build, whole."""
    try:
        found = manifest.load(folder)
        found.check_files(folder)
    except EngineError:
        return False
    return found.build_key == planned.key()


def check_outputs(front: FrontModel, widths: dict[str, int]) -> None:
    """Raise InvalidInputError unless the outputs in config.pbtxt are ones that the checkpoint gives."""
    for output in front.config.output:
        if output.name not in widths:
            raise InvalidInputError("output", output.name, f"one of {', '.join(widths)}")
        if list(output.dims) != [widths[output.name]]:
            wanted = f"dims: [ {widths[output.name]} ] for this checkpoint"
            raise InvalidInputError(f"output {output.name}", list(output.dims), wanted)
