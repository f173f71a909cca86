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
    """What one process of `model` wants of the GPU `device`: MiB by part."""

    model: str
    device: int
    parts: Mapping[str, float]

    @property
    def wanted_mb(self) -> float:
        """MiB in all."""
        return sum(self.parts.values())


def shares_of(model: str, parameters: Mapping[str, str], devices: Sequence[int]) -> list[Share]:
    """One share for each of `devices`, the GPUs of a model's processes; what states nothing has its context alone."""
    parts = {**json.loads(parameters.get(PARAMETER) or "{}"), "context": CONTEXT_MB}
    return [Share(model, device, parts) for device in devices]


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


def require_fit(shares: Sequence[Share], look_at: Callable[[int], tuple[Gpu, float]]) -> list[str]:
    """The lines of the plan, for each device its total and then its shares.

    look_at: the GPU of a number and its free MiB. Raises UnsupportedError, or its error, naming device, wanted and
    free for the first model, in the order of `shares`, that does not fit.
    """
    lines = []
    for device, group in groupby(sorted(shares, key=lambda one: one.device), lambda one: one.device):
        own = list(group)
        found, free = look_at(device)
        wanted, left = sum(one.wanted_mb for one in own), free
        name, room = f"GPU {device} ({found.name})", f"{free:.0f} of {found.memory_mb:.0f} MiB are free"
        for one in own:
            if one.wanted_mb > left:
                raise UnsupportedError(
                    f"{name}: {one.model} wants {_line(one)}; {left:.0f} MiB are left of the plan, {room}; serve fewer"
                    f" models (--models), or name another GPU in instance_group gpus of {one.model}; {CPU_INSTEAD}"
                )
            left -= one.wanted_mb
        lines += [f"{name}: {wanted:.0f} MiB are wanted, {room}", *(f"  {one.model}: {_line(one)}" for one in own)]
    return lines


def _line(share: Share) -> str:
    parts = ", ".join(f"{name} {size:.0f}" for name, size in share.parts.items())
    return f"{share.wanted_mb:.0f} MiB ({parts})"
