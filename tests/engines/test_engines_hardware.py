"""What a process may still allocate, read from files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.engines.hardware import available_mb

MB = 2**20


@pytest.mark.parametrize(
    ("limit", "used", "available"),
    [("max", 500 * MB, 3000.0), (2000 * MB, 500 * MB, 1500.0), (8000 * MB, 500 * MB, 3000.0), (None, None, 3000.0)],
    ids=["no limit", "a limit", "a limit above the machine's", "no control group"],
)
def test_memory_is_bounded_by_the_machine_and_the_control_group(
    tmp_path: Path, limit: object, used: object, available: float
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {4000 * 1024} kB\nMemAvailable: {3000 * 1024} kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
    assert available_mb(meminfo, tmp_path) == available
