"""The cores and memory of this machine, and the memory that each model asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shapeshift.engines import device_plan, hardware, manifest
from shapeshift.engines.checkpoint import weight_files
from shapeshift.engines.providers import lookup
from shapeshift.errors import EngineError, UnsupportedError

_MIB = 2**20
_OF_ENGINES = ("*.safetensors", "*.bin", "*.onnx", "*.plan")


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, and memory in MiB that it may still allocate, both within its control group."""

    cores: int
    available_mb: float


@dataclass(frozen=True)
class Ask:
    """The memory of a model in MiB, in all its processes.

    shared_key, shared_mb: weights that processes map together count once for all models with the same key; empty: none
    refusal(left_mb): why the model does not fit in so much, and what to change; None for the general text.
    """

    model: str
    memory_mb: float
    shared_key: str = ""
    shared_mb: float = 0.0
    refusal: Callable[[float], str] | None = field(default=None, compare=False)


def this_machine() -> Machine:
    """The machine that this process runs on."""
    return Machine(hardware.cores(), hardware.available_mb())


def ask_of(model: str, folder: Path, parameters: Mapping[str, str], limit_mb: float = 0.0) -> Ask:
    """What the model with these parameters in the generated `folder` asks for; 0 for one that holds no weights.

    limit_mb: of a process that holds several engines, above which it loads no further one; 0: it loads all. A lower
    bound: activations, and the libraries of each process, come on top.
    """
    engines = parameters.get("engines")
    source = engines or ("" if "forward_to" in parameters else parameters.get("checkpoint", ""))
    path = (folder / source).resolve()
    # The front counts its workers; the plan of the GPU counts what runs there.
    elsewhere = "worker_of" in parameters or (engines and device_plan.PARAMETER in parameters)
    if elsewhere or not source or not path.is_dir():
        return Ask(model, 0.0)
    placement = parameters.get("placement", "inline")
    # Reserved when the model loads.
    adapters_mb = float(parameters.get("adapter_mb", "0"))
    processes = 1 if placement == "inline" else int(parameters.get("workers", "1"))
    if engines:
        one, count = _engines_in(path)
        if parameters.get("provider") in lookup.OF_ANY_LENGTH:
            # All engines of all processes map one file, which holds them as they are multiplied.
            return Ask(model, one + adapters_mb)
    else:
        one, count = sum(file.stat().st_size for file in weight_files(path)) / _MIB, 1
    if placement == "partitioned":
        # A worker holds the engine of its bin.
        count = 1
    if parameters.get("precision") == "bf16" and (engines or _is_f32(path)):
        # The file is mapped and can be dropped; what is packed from it has half its size.
        one /= 2
    if parameters.get("precision") == "int8" and not engines:
        one /= 4 if _is_f32(path) else 2
    total_mb = one * count
    if not limit_mb or total_mb <= one:
        return Ask(model, processes * total_mb + adapters_mb)

    def refusal(left_mb: float) -> str:
        return f"memory_mb: got {limit_mb:.0f}; at most {left_mb / processes:.0f}, which are left for it"

    limited = processes * max(one, min(total_mb, limit_mb))
    return Ask(model, limited, refusal=lambda left: refusal(left) if left >= processes * one else "")


def _engines_in(folder: Path) -> tuple[float, int]:
    """MiB of the weights of one engine, and how many engines there are.

    Each text engine of most providers packs a copy of the weights for itself, even where engines share a file.
    """
    try:
        texts = manifest.load(folder)
    except EngineError:
        files = [file for kind in _OF_ENGINES for file in folder.rglob(kind)]
        return sum(file.stat().st_size for file in files) / _MIB, 1
    return texts.engine_mb, len(texts.engines)


def _is_f32(checkpoint: Path) -> bool:
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return config.get("dtype", config.get("torch_dtype")) not in ("float16", "bfloat16")


def fit(asks: Sequence[Ask], machine: Machine) -> tuple[str, dict[str, str]]:
    """One line that says what there is and what is asked for; and the models that do not fit, with the reason.

    Memory goes to the models in the order of `asks`: one that does not fit beside those before it takes none.
    """
    left, there = machine.available_mb, machine.available_mb
    mapped: set[str] = set()
    refused: dict[str, str] = {}
    for ask in asks:
        shared = ask.shared_mb if ask.shared_key in mapped else 0.0
        if ask.memory_mb - shared > left:
            general = (
                f"asks for at least {ask.memory_mb - shared:.0f} MiB; {left:.0f} of {there:.0f} MiB are left for it; "
                "serve fewer models (--models), or use a machine or control group with more memory"
            )
            refused[ask.model] = (ask.refusal(left + shared) if ask.refusal else "") or general
            continue
        left -= ask.memory_mb - shared
        mapped |= {ask.shared_key} - {""}
    named = ", ".join(f"{ask.model} {ask.memory_mb:.0f}" for ask in asks if ask.memory_mb)
    return f"{machine.cores} cores, {there:.0f} MiB available; models in MiB: {named or 'none'}", refused


def require_fit(asks: Sequence[Ask], machine: Machine) -> None:
    """Raise UnsupportedError naming the first model, in the order of `asks`, that does not fit."""
    for model, reason in fit(asks, machine)[1].items():
        raise UnsupportedError(f"memory: {model}: {reason}")
