"""An NVIDIA GPU as torch has it: whether it can be used, and how much of its memory is free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shapeshift.engines import gpu
from shapeshift.engines.gpu import CPU_INSTEAD
from shapeshift.errors import EngineError

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")


def require_usable(device: int) -> gpu.Gpu:
    """The GPU of this number. Raises UnsupportedError as `gpu.describe`, EngineError where this torch cannot use it."""
    # torch takes seconds to import: not for a look at the providers.
    import torch

    described = gpu.describe(device)
    build = torch.version.cuda or "none"
    what = f"GPU {device} ({described.name}): torch {torch.__version__} (CUDA {build}) cannot use it"
    if torch.version.cuda:
        # Within a major version newer libraries run on older drivers.
        driver = gpu.cuda_version(device)
        if driver[0] < int(build.partition(".")[0]):
            have = ".".join(map(str, driver))
            raise EngineError(
                f"{what}: its driver is too old, of CUDA {have}; install a driver of CUDA {build}, or a torch of CUDA"
                f" {driver[0]}; {CPU_INSTEAD}"
            )
    if not torch.cuda.is_available():
        raise EngineError(f"{what}; install torch for CUDA (`make setup GPU=1`); {CPU_INSTEAD}")
    if not _has_code(torch.cuda.get_arch_list(), described.capability):
        have = ".".join(map(str, described.capability))
        missing = f"it has no code for compute capability {have}; install a torch that has"
        raise EngineError(f"{what}: {missing}; {CPU_INSTEAD}")
    return described


def free_memory(device: int) -> tuple[float, str]:
    """MiB that are left of a GPU's memory, and where that is, as text. Raises as `require_usable`."""
    import torch

    described = require_usable(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free / 2**20, f"free of {described.memory_mb:.0f} MiB of GPU {device} ({described.name})"


def require_free(device: int, wanted_mb: float, what: str, remedy: str = gpu.LESS) -> None:
    """Raise EngineError where less than `wanted_mb` of a GPU's memory is free for `what`; else as `require_usable`."""
    free, place = free_memory(device)
    if wanted_mb > free:
        raise gpu.no_memory(device, what, f"{wanted_mb:.0f} MiB are wanted, {free:.0f} MiB are {place}", remedy)


@contextmanager
def naming_memory(device: int, what: str, remedy: str = gpu.LESS) -> Iterator[None]:
    """Turn torch's error for a full GPU into an EngineError that says what was wanted for `what`, and what is free."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        match = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        free, total = (size >> 20 for size in torch.cuda.mem_get_info(device))
        size = f"{match[1]} more" if match else "more"
        figures = f"{size} is wanted, {free} of {total} MiB are free"
        raise gpu.no_memory(device, what, figures, remedy) from None


def used_mb(device: int) -> float:
    """MiB of a GPU's memory that torch holds in this process."""
    import torch

    return float(torch.cuda.memory_reserved(device)) / 2**20


def _has_code(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a torch with code for these (sm_90, compute_90, ...) runs on a GPU.

    sm is code for later GPUs of the same major version, compute what the driver compiles for any later one.
    """
    for one in architectures:
        match = _ARCHITECTURE.match(one)
        if match is None:
            continue
        version = int(match[2]), int(match[3])
        if version <= capability and (match[1] == "compute" or version[0] == capability[0]):
            return True
    return not architectures
