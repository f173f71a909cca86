"""What a process may still allocate, read from files of the kernel."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.engines import hardware
from shapeshift.engines.hardware import available_mb, cores, cpu_has_bf16, cpu_model, gpus, resident_mb
from shapeshift.errors import UnsupportedError

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


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("max 100000", 6),
        ("100000 100000", 1),
        ("100001 100000", 2),
        ("50000 100000", 1),
        ("600000 100000", 6),
        ("900000 100000", 6),
        ("0 100000", 1),
        ("nonsense", 6),
        (None, 6),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, count: int
) -> None:
    asked: list[int] = []

    def affinity(pid: int) -> set[int]:
        asked.append(pid)
        return set(range(6))

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert cores(tmp_path) == count
    # 0 is the process itself.
    assert asked == [0]


@pytest.mark.parametrize(
    ("flags", "has_bf16"),
    [("avx2 amx_bf16", True), ("avx512_bf16", True), ("avx2 avx512f", False), ("no_amx_bf16x", False)],
)
def test_bf16_is_a_flag_of_the_cpu(tmp_path: Path, flags: str, has_bf16: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name : A\nflags : {flags}\nflags : other\n")
    assert cpu_has_bf16(file) is has_bf16


def test_a_cpu_that_says_nothing_has_no_bf16_and_the_name_of_its_architecture(tmp_path: Path) -> None:
    assert not cpu_has_bf16(tmp_path / "absent")
    assert cpu_model(tmp_path / "absent") == platform.machine()
    (tmp_path / "cpuinfo").write_text("processor : 0\n")
    assert not cpu_has_bf16(tmp_path / "cpuinfo")
    assert cpu_model(tmp_path / "cpuinfo") == f"{platform.machine()}, family ? model ? ()"


def test_gpus_are_the_numbered_devices(tmp_path: Path) -> None:
    assert gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia12", "sda"):
        (tmp_path / name).touch()
    assert gpus(tmp_path) == 3


def test_resident_memory_is_in_mib() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert resident_mb() == pytest.approx(int(fields["VmRSS"].split()[0]) / 1024, rel=0.2)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """A function that makes up whether the CPU has bf16."""
    return lambda has_bf16: monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: has_bf16)


@pytest.mark.parametrize(
    ("requested", "has_bf16", "wanted"),
    [
        ("auto", True, "bf16"),
        ("auto", False, "f32"),
        ("bf16", True, "bf16"),
        ("f32", True, "f32"),
        ("f32", False, "f32"),
    ],
)
def test_the_precision_of_a_cpu(cpu: Callable[[bool], None], requested: str, has_bf16: bool, wanted: str) -> None:
    cpu(has_bf16)
    assert hardware.resolve_precision(requested, "openvino", None) == wanted


def test_of_a_cpu_that_has_no_bf16_it_is_refused(cpu: Callable[[bool], None]) -> None:
    cpu(False)
    with pytest.raises(UnsupportedError, match="precision: bf16 needs a CPU with avx512_bf16 or AMX.*set f32 or auto"):
        hardware.resolve_precision("bf16", "openvino", None)


def test_onnxruntime_computes_in_f32_unless_another_precision_is_asked_for(cpu: Callable[[bool], None]) -> None:
    cpu(True)
    for device in (None, 0):
        assert hardware.resolve_precision("auto", "onnxruntime", device) == "f32"
    assert hardware.resolve_precision("bf16", "onnxruntime", None) == "bf16"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_below_what_is_in_use_goes_back() -> None:
    # Below the size from which glibc maps each piece of its own.
    size, count = 64 << 10, 2000
    pieces = [bytes([1]) * size for _ in range(count)]
    last = pieces.pop()
    del pieces
    before_mb = resident_mb()
    hardware.give_back_freed_memory()
    assert before_mb - resident_mb() > size * count / MB / 2
    assert last[0] == 1
