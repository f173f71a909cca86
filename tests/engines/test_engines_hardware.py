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


def machine(root: Path, groups: str, files: dict[str, object]) -> Path:
    """A root with 6 GiB available, /proc/self/cgroup, and files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {9 * 2**20} kB\nMemAvailable: {6 * 2**20} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def memory(folder: str, limit: object, used: int, unused: int) -> dict[str, object]:
    """The files of a group of version 2 whose pages of files make up `unused` of `used` bytes."""
    stat = f"anon {used - unused}\ninactive_file {unused}\nactive_file 0"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": stat}


def memory_1(folder: str, limit: int, used: int, unused: int) -> dict[str, object]:
    """The same of version 1, where `inactive_file` leaves out what groups below hold."""
    stat = f"inactive_file 0\ntotal_inactive_file {unused}"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return {f"{folder}{name}": value for name, value in zip(names, (limit, used, stat), strict=True)}


UNIT = "0::/system.slice/triton.service\n"
DOCKER_1 = "5:memory:/docker/ab12\n3:cpu,cpuacct:/docker/ab12\n0::/\n"
NO_LIMIT_1 = 9223372036854771712


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("0::/\n", {}, 6144),
        ("0::/\n", memory("", "max", 500 * MB, 0), 6144),
        ("0::/\n", memory("", 2000 * MB, 500 * MB, 0), 1500),
        ("0::/\n", memory("", 2000 * MB, 1900 * MB, 1300 * MB), 1400),
        ("0::/\n", memory("", 20000 * MB, 500 * MB, 0), 6144),
        ("0::/\n", memory("", 100 * MB, 101 * MB, 0), 0),
        (UNIT, memory("system.slice/triton.service/", 900 * MB, 400 * MB, 0), 500),
        (
            UNIT,
            memory("system.slice/triton.service/", "max", 0, 0) | memory("system.slice/", 700 * MB, 400 * MB, 0),
            300,
        ),
        (DOCKER_1, memory_1("memory/", 512 * MB, 300 * MB, 100 * MB), 312),
        (DOCKER_1, memory_1("memory/docker/ab12/", 512 * MB, 300 * MB, 0), 212),
        (DOCKER_1, memory_1("memory/", NO_LIMIT_1, 300 * MB, 0), 6144),
        ("", {}, 6144),
    ],
    ids=[
        *("no files", "no limit", "limit", "pages of files", "above the machine", "over", "unit", "slice"),
        *("container of version 1", "group of version 1", "no limit of version 1", "no groups"),
    ],
)
def test_memory_is_bounded_by_the_machine_and_the_control_groups(
    tmp_path: Path, groups: str, files: dict[str, object], available: float
) -> None:
    assert available_mb(machine(tmp_path, groups, files)) == available


@pytest.mark.parametrize(
    ("groups", "files", "count"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 6),
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "100001 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "900000 100000"}, 6),
        ("0::/\n", {"cpu.max": "0 100000"}, 1),
        ("0::/\n", {"cpu.max": "nonsense"}, 6),
        ("0::/\n", {}, 6),
        (UNIT, {"system.slice/triton.service/cpu.max": "250000 100000"}, 3),
        (UNIT, {"system.slice/triton.service/cpu.max": "max 100000", "system.slice/cpu.max": "200000 100000"}, 2),
        (DOCKER_1, {"cpu/cpu.cfs_quota_us": 150000, "cpu/cpu.cfs_period_us": 100000}, 2),
        (DOCKER_1, {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, 6),
        ("1:name=systemd:/\n0::/\n", {"unified/cpu.max": "100000 100000"}, 1),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: dict[str, object], count: int
) -> None:
    asked: list[int] = []

    def affinity(pid: int) -> set[int]:
        asked.append(pid)
        return set(range(6))

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert cores(machine(tmp_path, groups, files)) == count
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
