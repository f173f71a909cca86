"""Whether the models to serve fit: in the memory of this machine, and by one plan in that of each GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shapeshift.engines import capacity, device_plan, gpu, hardware
from shapeshift.engines.capacity import Machine
from shapeshift.errors import ShapeshiftError
from shapeshift.polymorph.settings import worker_name
from shapeshift.triton import model_config


class Free:
    """The memory that is free before the first of several plans: of the machine now, of a GPU when it is asked for."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine or capacity.this_machine()
        self.of_gpu = cache(lambda device: (gpu.describe(device), gpu.free_mb(device)))


def plan(repositories: Sequence[Path], models: Sequence[str], free: Free | None = None) -> tuple[str, dict[str, str]]:
    """Lines about the machine and the plan of each GPU; and, of `models`, those that do not fit, with the reason.

    free: what they share, where some of them may have taken their part already; None for what is free now.
    """
    free = free or Free()
    # It knows the techniques, and takes half a second.
    from shapeshift.build_engines.description import published_ask

    asks, shares = [], []
    for name, folder, config in _configs(repositories, models):
        if devices := devices_of(config):
            shares += device_plan.shares_of(name, model_config.parameters(config), devices)
        else:
            # Of weights that are not there the server says what is wrong.
            with contextlib.suppress(ShapeshiftError, OSError, KeyError, ValueError):
                asks.append(published_ask(name, folder, config))
    line, refused = capacity.fit(asks, free.machine)
    lines, refused_on_gpus = device_plan.fit(shares, free.of_gpu)
    return "".join(f"{one}\n" for one in (line, *lines)), {**refused_on_gpus, **refused}


def devices_of(config: Any) -> list[int]:
    """The GPUs of a model's processes, one for each process; empty on a CPU. Without a list Triton takes every GPU."""
    devices: list[int] = []
    for group in config.instance_group:
        if group.kind == group.KIND_GPU:
            devices += [*(group.gpus or range(max(1, hardware.gpus())))] * max(1, group.count)
    return devices


def _configs(repositories: Sequence[Path], models: Sequence[str]) -> Iterator[tuple[str, Path, Any]]:
    """The models, each followed by the workers that its first plan loads: name, folder, configuration."""
    for name in models:
        for folder in repositories:
            # Of a file that is not there or cannot be read the server says what is wrong.
            with contextlib.suppress(ShapeshiftError, OSError):
                config = model_config.read(folder / name / "config.pbtxt")
                yield name, folder / name, config
                for number in range(int(model_config.parameters(config).get("workers", "0"))):
                    worker = worker_name(name, number)
                    yield worker, folder / worker, model_config.read(folder / worker / "config.pbtxt")
