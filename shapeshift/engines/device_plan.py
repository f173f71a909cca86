"""One memory plan for each GPU: what every model that uses it wants of its memory, and what is free.

What a model wants is a parameter of its generated config.pbtxt: engines are measured when they are built, weights and
KV cache are computed. Each process has a context on the device besides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shapeshift.engines.gpu import CPU_INSTEAD, Gpu
from shapeshift.engines.manifest import FileEntry
from shapeshift.errors import UnsupportedError

PARAMETER = "device_memory"
"""The generated parameter: JSON, MiB by part."""
PARTS = ("engines", "KV", "adapters", "graphs")
CONTEXT_MB = 512.0
"""Of the CUDA context and the libraries of a process. Assumed, not measured."""


@dataclass(frozen=True)
class Share:
    """What one process of `model` wants of the GPU `device`: MiB by part. owner: the front of a worker, else empty."""

    model: str
    device: int
    parts: Mapping[str, float]
    owner: str = ""

    @property
    def wanted_mb(self) -> float:
        """MiB in all."""
        return sum(self.parts.values())


def shares_of(model: str, parameters: Mapping[str, str], devices: Sequence[int]) -> list[Share]:
    """One share for each of `devices`, the GPUs of a model's processes; what states nothing has its context alone."""
    parts = {**json.loads(parameters.get(PARAMETER) or "{}"), "context": CONTEXT_MB}
    return [Share(model, device, parts, parameters.get("worker_of", "")) for device in devices]


def as_parameter(parts: Mapping[str, float]) -> dict[str, str]:
    """The generated parameter for MiB by part, which is one of PARTS."""
    assert set(parts) <= set(PARTS)
    return {PARAMETER: json.dumps({name: round(size, 1) for name, size in parts.items()})}


def of_engines(provider: str, used_mb: float, files: Mapping[str, FileEntry]) -> dict[str, str]:
    """The generated parameter of a model's engines; none where they run on a CPU.

    used_mb: what they were seen to take when all of them had run. Of it the files hold the weights, of torch each all
    of them; the rest is what graphs compute in.
    """
    if not used_mb:
        return {}
    sizes = [entry.size / 2**20 for entry in files.values()]
    weights = min(used_mb, max(sizes) if provider == "torch" else sum(sizes))
    return as_parameter({"engines": weights, "graphs": used_mb - weights})


def fit(shares: Sequence[Share], look_at: Callable[[int], tuple[Gpu, float]]) -> tuple[list[str], dict[str, str]]:
    """The lines of the plan, for each device its total and then its shares; and the models that do not fit.

    look_at: the GPU of a number and its free MiB; its UnsupportedError is a reason too. Memory goes to the models in
    the order of `shares`: one that does not fit on all its devices takes none. A reason names device, wanted and free.
    """
    planned: dict[int, list[Share]] = {}
    refused: dict[str, str] = {}
    left: dict[int, float] = {}
    for model, group in groupby(shares, lambda one: one.owner or one.model):
        members, room = list(group), dict(left)
        try:
            for one in members:
                gpu, free = look_at(one.device)
                room.setdefault(one.device, free)
                if one.wanted_mb > room[one.device]:
                    raise UnsupportedError(
                        f"{_name(one.device, gpu)}: {one.model} wants {_line(one)}; {room[one.device]:.0f} MiB are left"
                        f" of the plan, {_room(gpu, free)}; serve fewer models (--models), or name another GPU in"
                        f" instance_group gpus of {one.model}; {CPU_INSTEAD}"
                    )
                room[one.device] -= one.wanted_mb
        except UnsupportedError as error:
            refused[model] = str(error)
            continue
        left = room
        for one in members:
            planned.setdefault(one.device, []).append(one)
    lines = []
    for device, accepted in sorted(planned.items()):
        gpu, free = look_at(device)
        total = sum(one.wanted_mb for one in accepted)
        lines.append(f"{_name(device, gpu)}: {total:.0f} MiB are wanted, {_room(gpu, free)}")
        lines += [f"  {one.model}: {_line(one)}" for one in accepted]
    return lines, refused


def _name(device: int, gpu: Gpu) -> str:
    return f"GPU {device} ({gpu.name})"


def _room(gpu: Gpu, free: float) -> str:
    return f"{free:.0f} of {gpu.memory_mb:.0f} MiB are free"


def _line(share: Share) -> str:
    parts = ", ".join(f"{name} {size:.0f}" for name, size in share.parts.items())
    return f"{share.wanted_mb:.0f} MiB ({parts})"
