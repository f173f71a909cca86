"""The placement of a text model's engines, and the model folders of its workers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapeshift.build_engines.model_folder import CONFIG, place_on, write_folder
from shapeshift.build_engines.text.config import TextFrontConfig, length_histogram
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph.policy import placement
from shapeshift.polymorph.policy.placement import Placement
from shapeshift.polymorph.service_times import bin_edges
from shapeshift.polymorph.settings import (
    MAX_WORKERS,
    PolymorphSettings,
    worker_name,
    worker_signature,
)
from shapeshift.serving.model_args import Tensor
from shapeshift.triton import model_config

# Generated parameters that a worker has no use for.
_OF_THE_FRONT = ("profile", "labels", "prompts")
_NAMED = "named in config.pbtxt"


def check_name(name: str, fronts: Collection[str]) -> None:
    """Raise InvalidInputError if the front `name` has the name of a worker of one of `fronts`."""
    for front in fronts:
        if _names_of(front).fullmatch(name):
            raise InvalidInputError("name", name, f"another name: a worker of {front} may have this one")


def choose_placement(params: PolymorphSettings, manifest: Manifest, devices: int) -> Placement:
    """The placement of the settings, with `auto` resolved.

    devices: the GPUs of the engines, 0: the CPU.
    """
    if params.placement == "auto":
        # On a CPU each engine holds its own packed copy of the weights, even if engines share a file: a file's size is
        # a lower bound of the memory of one engine. On a GPU the memory of all of them is measured.
        engine_mb = manifest.device_mb / len(manifest.engines) or manifest.engine_mb
        workers = params.workers or params.max_workers
        return placement.decide(len(manifest.engines), engine_mb, params.memory_mb, devices, workers, params.slo_ms > 0)
    if params.placement == "inline":
        return Placement("inline", 0, _NAMED)
    count = params.workers or max(params.min_workers, min(devices or 2, params.max_workers or MAX_WORKERS))
    return Placement("resident" if params.placement == "resident" else "partitioned", count, _NAMED)


def placement_parameters(placement: Placement, front: TextFrontConfig, manifest: Manifest) -> dict[str, str]:
    """The parameters of the placement in the generated config.pbtxt. Raises InvalidInputError as PolymorphSettings."""
    parameters = {"placement": placement.name, "placement_reason": placement.reason}
    if placement.name == "inline":
        return parameters
    params = front.serving
    most = max(params.max_workers, placement.workers)
    if params.min_workers > most or most > MAX_WORKERS:
        raise InvalidInputError("min_workers", params.min_workers, f"at most the maximum number of workers ({most})")
    # The constructor checks the settings again, now with the resolved placement.
    replace(params, placement=placement.name, workers=placement.workers, max_workers=most)
    edges = bin_edges(manifest)
    weights = length_histogram(front)
    shares = [sum(weights[low:high]) for low, high in zip([0, *edges], edges, strict=False)]
    return parameters | {
        "workers": str(placement.workers),
        "min_workers": str(params.min_workers or placement.workers),
        "max_workers": str(most),
        "bin_edges": json.dumps(edges),
        "plan_histogram": json.dumps([round(share / sum(shares), 6) for share in shares]),
    }


def write_workers(front: Any, manifest: Manifest, repository: Path, gpus: Sequence[int]) -> None:
    """Write the folders of the workers of the front with the generated config `front`, and delete its other workers.

    gpus: among which they are divided in turn; empty: the CPU.
    """
    parameters = model_config.parameters(front)
    count = 0 if parameters["placement"] == "inline" else int(parameters["max_workers"])
    configs = {
        worker_name(front.name, number): _worker_config(front, parameters, manifest, number, gpus)
        for number in range(count)
    }
    for folder in repository.iterdir():
        if _names_of(front.name).fullmatch(folder.name) and folder.name not in configs:
            shutil.rmtree(folder)
    for name, config in configs.items():
        write_folder(repository / name, {CONFIG: model_config.as_text(config)})


def _worker_config(front: Any, parameters: dict[str, str], manifest: Manifest, number: int, gpus: Sequence[int]) -> Any:
    config = type(front)()
    config.name = worker_name(front.name, number)
    config.backend = front.backend
    group = config.instance_group.add()
    group.count = 1
    group.kind = group.KIND_CPU
    if gpus:
        place_on(group, gpus[number % len(gpus)])
    # A worker takes texts of any length until the sidecar assigns a bin.
    longest_bin = 0 if parameters["placement"] == "resident" else manifest.max_tokens
    for name, value in {**parameters, "worker_of": str(front.name), "bin": str(longest_bin), "generation": "0"}.items():
        if name not in _OF_THE_FRONT:
            model_config.set_parameter(config, name, value)
    outputs = [Tensor(output.name, output.data_type, (-1, *output.dims)) for output in manifest.outputs]
    return model_config.complete(config, worker_signature(outputs))


def _names_of(front: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(front)}_w\d+")
