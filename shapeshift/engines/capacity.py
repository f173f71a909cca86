"""The cores and memory of this machine, and the least memory that each model asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shapeshift.engines import hardware
from shapeshift.engines.checkpoint import weight_files
from shapeshift.errors import UnsupportedError

_MIB = 2**20
_OF_ENGINES = ("*.safetensors", "*.bin", "*.onnx", "*.plan")


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, and memory in MiB that it may still allocate, both within its control group."""

    cores: int
    available_mb: float


@dataclass(frozen=True)
class Ask:
    """The least memory of a model in MiB: that of its weight files, once for each process that opens them."""

    model: str
    memory_mb: float


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(hardware.cores(), hardware.available_mb())


def ask_of(model: str, folder: Path, parameters: Mapping[str, str]) -> Ask:
    """What the model with these parameters in the generated `folder` asks for; 0 for one that holds no weights.

    A lower bound: caches, activations and packed copies of the weights come on top.
    """
    engines = parameters.get("engines")
    source = engines or ("" if "forward_to" in parameters else parameters.get("checkpoint", ""))
    path = (folder / source).resolve()
    if not source or not path.is_dir():
        return Ask(model, 0.0)
    copies = 1 if parameters.get("placement", "inline") == "inline" else int(parameters.get("workers", "1"))
    files = [file for kind in _OF_ENGINES for file in path.rglob(kind)] if engines else weight_files(path)
    size: float = sum(file.stat().st_size for file in files)
    if parameters.get("precision") == "bf16" and (engines or _is_f32(path)):
        # The file is mapped and can be dropped; what is packed from it has half its size.
        size /= 2
    return Ask(model, copies * size / _MIB)


def _is_f32(checkpoint: Path) -> bool:
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return config.get("dtype", config.get("torch_dtype")) not in ("float16", "bfloat16")


def require_fit(asks: Sequence[Ask], machine: Machine) -> str:
    """One line that says what there is and what is asked for.

    Raises UnsupportedError naming the first model, in the order of `asks`, whose least memory is no longer there.
    """
    left, there = machine.available_mb, machine.available_mb
    for ask in asks:
        if ask.memory_mb > left:
            raise UnsupportedError(
                f"memory: {ask.model} asks for at least {ask.memory_mb:.0f} MiB; {left:.0f} of {there:.0f} MiB are "
                "left for it; serve fewer models (--models), or use a machine or control group with more memory"
            )
        left -= ask.memory_mb
    named = ", ".join(f"{ask.model} {ask.memory_mb:.0f}" for ask in asks if ask.memory_mb)
    return f"{machine.cores} cores, {there:.0f} MiB available; weights in MiB: {named or 'none'}"
