"""What is asked of a GPU, and what is said where it cannot be used. The driver, NVML and torch's calls are fakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shapeshift.engines import cuda_device, gpu, hardware
from shapeshift.engines.interfaces import PROVIDERS
from shapeshift.errors import EngineError, UnsupportedError
from tests.engines.driver import Driver, Management, install

OFFER = (
    r"to use the CPU, set instance_group \[ \{ kind: KIND_CPU \} \] in its config.pbtxt and run `shapeshift engines`"
)


def torch_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None, architectures: list[str], usable: bool = True) -> None:
    """Let torch be one for this version of CUDA, with code for these architectures."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)


def test_a_gpu_is_described_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver(2, (7, 5)))
    found = gpu.describe(1)
    assert (found.device, found.name, found.capability, found.memory_mb) == (1, "H100", (7, 5), 80 * 1024)
    assert not found.has_bf16 and gpu.cuda_version(1) == (13, 2)
    assert gpu.with_cpu(1).startswith("H100, compute capability 7.5; ")


@pytest.mark.parametrize(
    ("driver", "text"),
    [
        (None, "GPU 3: this machine has no NVIDIA driver"),
        (Driver(2), "GPU 3: the NVIDIA driver shows 2 devices.*name another in instance_group gpus"),
        (Driver(2, status=100), "GPU 3: the NVIDIA driver reports error 100"),
    ],
)
def test_a_driver_or_a_device_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, text: str
) -> None:
    install(monkeypatch, driver)
    for ask in (gpu.describe, gpu.cuda_version, gpu.free_mb, cuda_device.require_usable):
        with pytest.raises(UnsupportedError, match=f"{text}.*; {OFFER}"):
            ask(3)


@pytest.mark.parametrize(
    ("driver", "cuda", "architectures", "usable", "text"),
    [
        (Driver(1), None, [], False, r"\(CUDA none\) cannot use it; install torch for CUDA \(`make setup GPU=1`\)"),
        (
            Driver(1, cuda=12080),
            "13.2",
            ["sm_90"],
            False,
            "its driver is too old, of CUDA 12.8; .*torch of CUDA 12",
        ),
        (Driver(1, (7, 0)), "13.2", ["sm_75", "sm_90", "compute_90"], True, "no code for compute capability 7.0"),
        (Driver(1, (10, 0)), "12.4", ["sm_80", "sm_90a"], True, "no code for compute capability 10.0"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Driver,
    cuda: str | None,
    architectures: list[str],
    usable: bool,
    text: str,
) -> None:
    install(monkeypatch, driver)
    torch_for(monkeypatch, cuda, architectures, usable)
    with pytest.raises(EngineError, match=rf"GPU 0 \(H100\): torch .*{text}.*; {OFFER}"):
        PROVIDERS["torch"].open(tmp_path, "f32", 1, 0)


@pytest.mark.parametrize(
    ("driver", "cuda", "architectures"),
    [
        # Libraries of CUDA 12.8 on a driver of 12.2, code of 8.0 on an 8.6, and a GPU that is newer than torch.
        (Driver(1, (8, 6), cuda=12020), "12.8", ["sm_80"]),
        (Driver(1, (12, 0)), "12.8", ["sm_90", "compute_90"]),
    ],
)
def test_a_torch_that_runs_on_the_gpu_is_taken(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, cuda: str, architectures: list[str]
) -> None:
    install(monkeypatch, driver)
    torch_for(monkeypatch, cuda, architectures)
    assert cuda_device.require_usable(0).capability == driver.capability


def test_what_is_free_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver(2))
    torch_for(monkeypatch, None, ["sm_90"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device * 3 << 30, 80 << 30))
    assert cuda_device.free_memory(1) == (3 * 1024, "free of 81920 MiB of GPU 1 (H100)")
    with pytest.raises(UnsupportedError, match="GPU 2: the NVIDIA driver shows 2 devices"):
        cuda_device.free_memory(2)
    cuda_device.require_free(1, 3072, "encode")
    wanted = rf"GPU 1: no memory for encode: 3073 MiB are wanted, 3072 MiB are free of 81920 MiB of GPU 1 .*; {OFFER}"
    with pytest.raises(EngineError, match=wanted):
        cuda_device.require_free(1, 3073, "encode")


def test_what_is_free_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver(2), Management([70_000, 500]))
    assert [gpu.free_mb(device) for device in (0, 1)] == [70_000, 500]
    # More than the device has, as of the whole GPU of a slice; and a library that is missing or fails.
    for management in (Management([90_000, 500]), None, Management([5, 5], status=9)):
        install(monkeypatch, Driver(2), management)
        assert gpu.free_mb(0) == 80 * 1024


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetMemoryInfo"])
def test_where_one_call_of_nvml_fails_all_of_the_memory_counts_as_free(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    management = Management([500])
    management.broken = call
    install(monkeypatch, Driver(1), management)
    assert gpu.free_mb(0) == 80 * 1024


DESCRIBED = ("cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetName", "cuDeviceTotalMem_v2")


@pytest.mark.parametrize(
    ("ask", "call"),
    [
        *((gpu.describe, call) for call in DESCRIBED),
        (gpu.cuda_version, "cuDriverGetVersion"),
        (gpu.free_mb, "cuDeviceGetPCIBusId"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_each_call_of_the_driver_that_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[int], object], call: str
) -> None:
    driver = Driver(1)
    driver.broken = call
    install(monkeypatch, driver, Management([500]))
    with pytest.raises(UnsupportedError, match="GPU 0: the NVIDIA driver reports error 7"):
        ask(0)


@pytest.mark.parametrize(("cuda", "version"), [(13020, (13, 2)), (12080, (12, 8)), (9000, (9, 0))])
def test_the_version_of_cuda_is_two_numbers(
    monkeypatch: pytest.MonkeyPatch, cuda: int, version: tuple[int, int]
) -> None:
    install(monkeypatch, Driver(1, cuda=cuda))
    assert gpu.cuda_version(0) == version


@pytest.mark.parametrize(("capability", "has_bf16"), [((7, 5), False), ((8, 0), True), ((8, 6), True), ((10, 0), True)])
def test_bf16_is_there_since_a_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_bf16: bool
) -> None:
    install(monkeypatch, Driver(1, capability))
    assert gpu.describe(0).has_bf16 is has_bf16


def test_memory_that_runs_out_is_an_error_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 20, 80 << 30))
    said = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 20.00 MiB"
    for text, asked in ((said, "2.50 GiB more"), ("CUDA error", "more")):
        wanted = (
            rf"GPU 1: no memory for the graph of 64 tokens: {asked} is wanted, 20 of 81920 MiB are free; .*; {OFFER}"
        )
        with pytest.raises(EngineError, match=wanted), cuda_device.naming_memory(1, "the graph of 64 tokens"):
            raise torch.cuda.OutOfMemoryError(text)
    with pytest.raises(ValueError, match="other"), cuda_device.naming_memory(1, "the graph of 64 tokens"):
        raise ValueError("other")


@pytest.mark.parametrize(
    ("requested", "capability", "wanted"),
    [("auto", (9, 0), "bf16"), ("auto", (7, 5), "f16"), ("f16", (9, 0), "f16"), ("f32", (7, 5), "f32")],
)
def test_the_precision_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, requested: str, capability: tuple[int, int], wanted: str
) -> None:
    install(monkeypatch, Driver(1, capability))
    assert hardware.resolve_precision(requested, "torch", 0) == wanted


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver(1, (7, 5)))
    with pytest.raises(UnsupportedError, match=r"bf16 needs compute capability 8.0; GPU 0 \(H100\) has 7.5; set f16"):
        hardware.resolve_precision("bf16", "torch", 0)
    with pytest.raises(UnsupportedError, match="f16 is for GPUs; on a CPU set f32, bf16 or auto"):
        hardware.resolve_precision("f16", "torch", None)
    assert hardware.resolve_precision("auto", "onnxruntime", None) == "f32"
