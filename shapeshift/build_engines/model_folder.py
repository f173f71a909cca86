"""Writing the folders of models in the generated repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shapeshift import files
from shapeshift.engines import hardware
from shapeshift.engines.interfaces import PROVIDERS, Provider
from shapeshift.engines.providers import lookup
from shapeshift.errors import InvalidInputError
from shapeshift.triton import model_config

UP_TO_DATE, BUILT = "up to date", "built"
CONFIG = "config.pbtxt"
# How to call the model; its placeholders are {host}, {http_port} and {grpc_port}.
HOW_TO_CALL = "how_to_call.txt"
# One line: how the model was made.
SUMMARY = "summary.txt"
VERSION = "1"


def write_front(
    source: Path,
    config: Any,
    target: Path,
    parameters: Mapping[str, str],
    summary: str,
    extra_files: Mapping[str, str] | None = None,
    device: int | None = None,
) -> Any:
    """Write the folder `target` of a front: `config` with these parameters, and `extra_files` (contents by name).

    The how_to_call.txt in `source` is copied; `summary` is one line. device: the GPU that the front's own process
    uses, unless the config.pbtxt in `source` states an instance_group. Returns the config, named as the folder.
    """
    generated = type(config)()
    generated.CopyFrom(config)
    generated.name = target.name
    if device is not None and not is_placed(source):
        place_on(generated.instance_group[0], device)
    for name, value in parameters.items():
        model_config.set_parameter(generated, name, value)
    contents = {CONFIG: model_config.as_text(generated), SUMMARY: f"{summary}\n", **(extra_files or {})}
    if (source / HOW_TO_CALL).is_file():
        contents[HOW_TO_CALL] = (source / HOW_TO_CALL).read_text(encoding="utf-8")
    write_folder(target, contents)
    return generated


def gpus_of(source: Path) -> list[int]:
    """The GPUs that the front in `source` may use: those of its instance_group, without one all of this machine."""
    groups = model_config.read(source / CONFIG).instance_group
    if not groups:
        return list(range(hardware.gpus()))
    chosen = next((group for group in groups if group.kind == group.KIND_GPU), None)
    if chosen is None:
        return []
    return list(chosen.gpus) or list(range(max(1, hardware.gpus())))


def provider_of(source: Path, requested: str) -> tuple[Provider, Sequence[int]]:
    """The provider of the engines of the front in `source`, and the GPUs that they run on, none for the CPU.

    Raises InvalidInputError where the front states KIND_GPU for a provider that runs on CPUs.
    """
    gpus = gpus_of(source)
    name = lookup.resolve(requested, gpus)
    if name not in lookup.ON_GPU and gpus and is_placed(source):
        raise InvalidInputError("provider", name, f"with KIND_GPU one of {', '.join(lookup.ON_GPU)}, or auto")
    return PROVIDERS[name], lookup.usable(name, gpus)


def is_placed(source: Path) -> bool:
    """Whether the config.pbtxt in `source` states an instance_group."""
    return bool(model_config.read(source / CONFIG).instance_group)


def place_on(group: Any, device: int) -> None:
    """Let the instances of the group `group` use the GPU `device`."""
    group.kind = group.KIND_GPU
    group.ClearField("gpus")
    group.gpus.append(device)


def write_folder(target: Path, contents: Mapping[str, str]) -> None:
    """Replace the model folder `target` as a whole by these files and an empty version. An identical folder is left
    untouched: it may be in use.
    """
    if _contents(target) == contents:
        return
    # A server takes each folder of the repository for a model.
    with files.replace_folder(target, within=target.parent.parent) as work:
        (work / VERSION).mkdir()
        for name, text in contents.items():
            (work / name).write_text(text, encoding="utf-8")


def _contents(folder: Path) -> dict[str, str] | None:
    """The files below `folder`: contents by relative path. None if it is not a model folder."""
    if not (folder / VERSION).is_dir():
        return None
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8", errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }
