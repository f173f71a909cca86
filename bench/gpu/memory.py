"""How long an adapter of rank 64 of a 7B shape takes to reach the device: from pinned memory, and from a file.

The file is not in memory when it is read, as far as the operating system drops it when it is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.common.output import FOLDER, empty
from bench.gpu.adapters import factors
from bench.gpu.decode import SEVEN_BILLION, TINY
from bench.gpu.device import Device
from bench.gpu.part import Part, Row, ratio
from bench.gpu.random_models import Shape, architecture_of
from shapeshift.adapter_cache.lora.batch import adaptable_of_decoder, lay_out
from shapeshift.fused_decode.model.architecture import Architecture


@dataclass(frozen=True)
class Sizes:
    """The shape of the model, and the rank of the adapter."""

    shape: Shape
    rank: int
    rounds: int


def measure(device: Device, sizes: Sizes, seed: int) -> Iterator[Row]:
    """See the module."""
    elements = adapter_elements(architecture_of(sizes.shape), sizes.rank)
    times_ms = copies(device, elements, sizes.rounds, seed)
    yield {
        "rank": sizes.rank,
        "MiB": round(elements * device.dtype.itemsize / 2**20, 1),
        "from pinned memory, ms": round(times_ms["pinned"], 3),
        "from a file, ms": round(times_ms["file"], 3),
        "file / pinned": ratio(times_ms["file"], times_ms["pinned"]),
    }


def adapter_elements(architecture: Architecture, rank: int) -> int:
    """The numbers of an adapter of this rank, as it lies in memory."""
    _, elements = lay_out(adaptable_of_decoder(architecture), factors(architecture, rank))
    return elements


def copies(device: Device, elements: int, rounds: int, seed: int) -> dict[str, float]:
    """Median milliseconds of bringing so many numbers to the device: from "pinned" memory, and from a "file"."""
    folder = FOLDER / "gpu" / "memory"
    empty(folder)
    file = folder / "adapter.safetensors"
    source = torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(device.dtype)
    save_file({"factors": source}, file)
    pinned = source if device.number is None else source.pin_memory()
    target = torch.empty_like(source, device=device.torch_device)

    def from_file() -> object:
        _forget(file)
        with safe_open(str(file), framework="pt") as opened:
            return target.copy_(opened.get_tensor("factors"))

    return device.in_turn({"pinned": lambda: target.copy_(pinned, non_blocking=True), "file": from_file}, rounds)


def _forget(file: Path) -> None:
    """Ask the system to drop what it holds of the file in memory."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


PART = Part(
    "an adapter of rank 64 of a 7B shape, from pinned memory and from a file",
    measure,
    Sizes(SEVEN_BILLION, 64, rounds=10),
    Sizes(TINY, 8, rounds=1),
    minutes=1.0,
)
