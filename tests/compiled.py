"""The compiled kernels of this project, for the projects of tests: each would compile them for a minute."""

from __future__ import annotations

from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "build" / "kernels"


def link_kernels(build: Path) -> None:
    """Make the build folder `build`, if need be, and let it have these kernels."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    build.mkdir(parents=True, exist_ok=True)
    (build / "kernels").symlink_to(KERNELS)
