"""An NVIDIA GPU as torch has it: whether it can be used, and how much of its memory is free."""

from __future__ import annotations

from shapeshift.engines import gpu
from shapeshift.errors import EngineError


def require_usable(device: int) -> gpu.Gpu:
    """The GPU of this number. Raises UnsupportedError as `gpu.describe`, EngineError where this torch cannot use it."""
    # torch takes seconds to import: not for a look at the providers.
    import torch

    found = gpu.describe(device)
    if not torch.cuda.is_available():
        build = torch.version.cuda or "none"
        raise EngineError(
            f"GPU {device} ({found.name}): torch {torch.__version__} (CUDA {build}) cannot use it; install torch for"
            " CUDA (`make setup GPU=1`) and a driver that is new enough, or set instance_group KIND_CPU"
        )
    return found


def free_memory(device: int) -> tuple[float, str]:
    """MiB that are left of a GPU's memory, and where that is, as text. Raises as `require_usable`."""
    import torch

    found = require_usable(device)
    free, _ = torch.cuda.mem_get_info(device)
    return free / 2**20, f"free of {found.memory_mb:.0f} MiB of GPU {device} ({found.name})"
