"""Where a model's engines will live, and the folders of the workers that hold them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from build_engines import edges
from build_engines.published import CONFIG, write_folder
from build_engines.settings import FrontModel
from shapeshift.engines.hardware import gpus
from shapeshift.engines.manifest import Manifest
from shapeshift.errors import InvalidInputError
from shapeshift.polymorph import placement
from shapeshift.polymorph.placement import Placement
from shapeshift.polymorph.profile import bin_edges
from shapeshift.polymorph.settings import MOST_WORKERS, PolymorphSettings, worker_name
from shapeshift.polymorph.worker import INPUTS, STATE
from shapeshift.triton import modelconfig

_MIB = 2**20


def check_names(fronts: Sequence[str]) -> None:
    """Raise InvalidInputError for a front that is named as a worker of another would be."""
    for name in fronts:
        if any(_names_of(front).fullmatch(name) for front in fronts):
            raise InvalidInputError("name", name, "another name: workers of a front are named so")


def place(own: PolymorphSettings, made: Manifest) -> Placement:
    """The placement that config.pbtxt names, or the one that `auto` comes to."""
    devices = gpus() if made.provider in ("tensorrt", "onnxruntime") else 0
    if own.placement == "auto":
        # Each engine holds the weights packed in its own way, whether it has a file of its own or shares one;
        # a file's size is what that takes at least.
        files = len({entry.file for entry in made.engines})
        engine_mb = sum(entry.size for entry in made.files.values()) / files / _MIB
        wanted = own.workers or own.max_workers
        return placement.decide(len(made.engines), engine_mb, own.memory_mb, devices, wanted)
    if own.placement == "inline":
        return Placement("inline", 0, "named in config.pbtxt")
    count = own.workers or max(own.min_workers, min(devices or 2, own.max_workers or MOST_WORKERS))
    return Placement("resident" if own.placement == "resident" else "partitioned", count, "named in config.pbtxt")


def stated(placed: Placement, front: FrontModel, made: Manifest) -> dict[str, str]:
    """The parameters in which the generated config.pbtxt says so. Raises InvalidInputError as the settings do."""
    found = {"placement": placed.name, "placement_reason": placed.reason}
    if placed.name == "inline":
        return found
    own = front.serving
    most = max(own.max_workers, placed.workers, own.pool_workers)
    if own.min_workers > most or most > MOST_WORKERS:
        raise InvalidInputError("min_workers", own.min_workers, f"at most the most workers ({most})")
    # What was checked before the placement was known is checked again.
    replace(own, placement=placed.name, workers=placed.workers, max_workers=most)
    ends = bin_edges(made)
    weights = edges.length_histogram(front)
    shares = [sum(weights[low:high]) for low, high in zip([0, *ends], ends, strict=False)]
    return found | {
        "workers": str(placed.workers),
        "min_workers": str(own.min_workers or (1 if own.worker_pool else placed.workers)),
        "max_workers": str(most),
        "bin_edges": json.dumps(ends),
        "plan_histogram": json.dumps([round(share / sum(shares), 6) for share in shares]),
    }


def generate(front: Any, made: Manifest, repository: Path) -> None:
    """Write the folders of the workers of the front with the generated config `front`; older ones go."""
    parameters = modelconfig.parameters(front)
    count = 0 if parameters["placement"] == "inline" else int(parameters["max_workers"])
    configs = {worker_name(front.name, number): _worker(front, parameters, made, number) for number in range(count)}
    for folder in repository.iterdir():
        if _names_of(front.name).fullmatch(folder.name) and folder.name not in configs:
            shutil.rmtree(folder)
    for name, config in configs.items():
        write_folder(repository / name, {CONFIG: modelconfig.as_text(config)})


def _worker(front: Any, parameters: dict[str, str], made: Manifest, number: int) -> Any:
    config = type(front)()
    config.name = worker_name(front.name, number)
    config.backend = front.backend
    config.max_batch_size = 0
    for name, data_type in zip(INPUTS, ("TYPE_INT64", "TYPE_INT32"), strict=True):
        _tensor(config.input.add(), name, data_type, [-1])
    for output in made.outputs:
        _tensor(config.output.add(), output.name, output.data_type, [-1, *output.dims])
    _tensor(config.output.add(), STATE, "TYPE_INT64", [3])
    group = config.instance_group.add()
    group.count = 1
    devices = gpus() if made.provider in ("tensorrt", "onnxruntime") else 0
    group.kind = group.KIND_GPU if devices else group.KIND_CPU
    if devices:
        group.gpus.append(number % devices)
    # Until a scheduler says otherwise a worker takes any text.
    whole = 0 if parameters["placement"] == "resident" else made.max_tokens
    for name, value in {**parameters, "worker_of": str(front.name), "bin": str(whole), "generation": "0"}.items():
        if name != "profile":
            modelconfig.set_parameter(config, name, value)
    return config


def _names_of(front: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(front)}_w\d+")


def _tensor(tensor: Any, name: str, data_type: str, dims: list[int]) -> None:
    tensor.name = name
    tensor.data_type = type(tensor).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name[data_type].number
    tensor.dims.extend(dims)
