"""What provider onnxruntime asks of the library on a GPU, which stands here as a fake that records it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shapeshift.engines.interfaces import INPUT_AXES
from shapeshift.engines.providers.onnxruntime import PROVIDER
from shapeshift.errors import EngineError, UnsupportedError
from tests.engines.driver import Driver, Management, install

CUDA = "CUDAExecutionProvider"


class FakeValue:
    """An array on the device `place`; its identity is its address."""

    def __init__(self, values: Any, place: tuple[str, int]) -> None:
        self.values, self.place = values.copy(), place

    def update_inplace(self, values: Any) -> None:
        assert values.shape == self.values.shape and values.dtype == self.values.dtype
        self.values[...] = values

    def numpy(self) -> Any:
        return self.values.copy()


class FakeOnnxRuntime:
    """Its model gives the sum of a row's ids. Once a graph is captured, other addresses are an error.

    loads: whether the first provider can be loaded; full: what is raised when a session computes for the first time.
    """

    __version__ = "1.31"
    loads = True
    full = ""
    preloads = False

    def __init__(self, providers: list[str]) -> None:
        self.providers = providers
        self.asked: list[Any] = []
        self.OrtValue = SimpleNamespace(
            ortvalue_from_numpy=lambda values, kind, device: FakeValue(values, (kind, device))
        )

    def preload_dlls(self) -> None:
        self.preloads = True

    def get_available_providers(self) -> list[str]:
        return self.providers

    def SessionOptions(self) -> Any:  # noqa: N802  the library's name
        sizes: dict[str, int] = {}
        return SimpleNamespace(sizes=sizes, add_free_dimension_override_by_name=sizes.__setitem__)

    def InferenceSession(self, file: str, options: Any, providers: list[Any]) -> Any:  # noqa: N802
        self.asked.append(providers)
        bound: dict[str, FakeValue] = {}
        captured: list[list[int]] = []

        def port(name: str, axes: Any) -> Any:
            shape = [options.sizes.get(axes[axis], axes[axis]) if axis in axes else 1 for axis in range(max(axes) + 1)]
            return SimpleNamespace(name=name, shape=shape)

        def run(binding: object) -> None:
            if self.full:
                raise RuntimeError(self.full)
            addresses = [id(value) for value in bound.values()]
            captured.append(addresses)
            assert addresses == captured[0], "a graph has the addresses of its capture in it"
            ids, segments, rows = (bound[name].values for name in ("INPUT_IDS", "SEGMENTS", "ROWS"))
            bound["EMBEDDING"].values[...] = [[ids[segments == row].sum()] * 2 for row in rows]

        def computed(names: list[str], given: dict[str, Any]) -> list[Any]:
            if self.full:
                raise RuntimeError(self.full)
            return [given["INPUT_IDS"].sum(1, keepdims=True) for _ in names]

        output = port("EMBEDDING", {0: "rows"})
        output.shape.append(2)
        return SimpleNamespace(
            get_inputs=lambda: [port(name, dict(axes)) for name, axes in INPUT_AXES.items()],
            get_outputs=lambda: [output],
            io_binding=lambda: SimpleNamespace(
                bind_ortvalue_input=bound.__setitem__, bind_ortvalue_output=bound.__setitem__
            ),
            run_with_iobinding=run,
            run=computed,
            get_providers=lambda: [one if isinstance(one, str) else one[0] for one in providers][not self.loads :],
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeOnnxRuntime:
    made = FakeOnnxRuntime([CUDA, "CPUExecutionProvider"])
    monkeypatch.setitem(sys.modules, "onnxruntime", made)
    install(monkeypatch, Driver(2), Management([70_000, 500]))
    (tmp_path / "model.onnx").write_bytes(bytes(3 << 20))
    return made


def test_a_static_length_is_a_graph_on_its_device(tmp_path: Path, library: FakeOnnxRuntime) -> None:
    runtime = PROVIDER.open(tmp_path, "f32", 1, 1)
    engine = runtime.engine(8, 2)
    assert library.asked == [[(CUDA, {"device_id": 1, "enable_cuda_graph": "1"})]] and library.preloads
    for factor in (1, 3):
        inputs = {
            "INPUT_IDS": np.arange(8)[None] * factor,
            "SEGMENTS": np.array([[1, 1, 1, 2, 2, 0, 0, 0]]),
            "POSITIONS": np.zeros((1, 8), np.int64),
            "ROWS": np.array([1, 2]),
        }
        np.testing.assert_array_equal(engine.run(inputs)["EMBEDDING"], np.array([[3, 3], [7, 7]]) * factor)
    runtime.engine(None, None)
    assert library.asked[1] == [(CUDA, {"device_id": 1})], "any shape is no graph"
    assert runtime.used_mb() == 6, "each session has its own weights"


def test_a_build_for_cpus_is_not_taken_for_a_gpu(tmp_path: Path, library: FakeOnnxRuntime) -> None:
    library.providers.remove(CUDA)
    with pytest.raises(UnsupportedError, match=r"GPU 1: this onnxruntime 1.31 is for CPUs; .*; to use the CPU"):
        PROVIDER.open(tmp_path, "f32", 1, 1)
    PROVIDER.open(tmp_path, "f32", 1)


@pytest.mark.parametrize("shape", [(8, 2), (None, None)])
def test_the_cpu_is_not_taken_silently_where_cuda_cannot_be_loaded(
    tmp_path: Path, library: FakeOnnxRuntime, shape: tuple[int | None, int | None]
) -> None:
    library.loads = False
    with pytest.raises(EngineError, match=f"GPU 1: ONNX Runtime cannot load {CUDA}, see its log; .*; to use the CPU"):
        PROVIDER.open(tmp_path, "f32", 1, 1).engine(*shape)


def test_a_device_that_is_not_there_is_named(tmp_path: Path, library: FakeOnnxRuntime) -> None:
    with pytest.raises(UnsupportedError, match=r"GPU 2: the NVIDIA driver shows 2 devices, .*; to use the CPU"):
        PROVIDER.open(tmp_path, "f32", 1, 2)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("Failed to allocate memory for requested buffer of size 33554432", "32 MiB more are wanted"),
        ("CUDA failure 2: out of memory ; GPU=1 ; hostname=a", "more is wanted"),
    ],
)
def test_a_full_gpu_is_an_error_with_figures(tmp_path: Path, library: FakeOnnxRuntime, said: str, asked: str) -> None:
    library.full = f"Non-zero status code returned: {said}"
    wanted = f"GPU 1: no memory for the engine of 8 tokens: {asked}, 500 MiB are free; serve fewer models on it, .*CPU"
    with pytest.raises(EngineError, match=wanted):
        PROVIDER.open(tmp_path, "f32", 1, 1).engine(8, 2)
    library.full = "another fault"
    with pytest.raises(RuntimeError, match="another fault"):
        PROVIDER.open(tmp_path, "f32", 1, 1).engine(8, 2)


INPUTS = {"INPUT_IDS": np.ones((1, 300), np.int64), "SEGMENTS": np.ones((1, 300), np.int64)}
INPUTS |= {"POSITIONS": INPUTS["INPUT_IDS"], "ROWS": np.array([1])}


def test_a_gpu_that_is_full_while_it_serves_is_an_error_with_figures(tmp_path: Path, library: FakeOnnxRuntime) -> None:
    engine = PROVIDER.open(tmp_path, "f32", 1, 1).engine(None, None)
    assert engine.run(INPUTS)["EMBEDDING"] == 300
    library.full = "Failed to allocate memory for requested buffer of size 33554432"
    wanted = "GPU 1: no memory for a call of 1 x 300 INPUT_IDS: 32 MiB more are wanted, 500 MiB are free; .*CPU"
    with pytest.raises(EngineError, match=wanted):
        engine.run(INPUTS)
    library.full = "another fault"
    with pytest.raises(RuntimeError, match="another fault"):
        engine.run(INPUTS)


def test_a_full_gpu_without_a_driver_to_ask(
    tmp_path: Path, library: FakeOnnxRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PROVIDER.open(tmp_path, "f32", 1, 1).engine(None, None)
    library.full = "CUDA failure 2: out of memory"

    def gone(device: int) -> float:
        raise UnsupportedError("the driver is gone")

    monkeypatch.setattr("shapeshift.engines.gpu.free_mb", gone)
    with pytest.raises(EngineError, match="more is wanted, what is free is not known"):
        engine.run(INPUTS)


def test_a_cpu_is_not_asked_for_the_memory_of_a_gpu(tmp_path: Path, library: FakeOnnxRuntime) -> None:
    engine = PROVIDER.open(tmp_path, "f32", 1).engine(None, None)
    library.full = "out of memory"
    with pytest.raises(RuntimeError, match="^out of memory$"):
        engine.run(INPUTS)


def test_a_graph_that_is_full_while_it_serves(tmp_path: Path, library: FakeOnnxRuntime) -> None:
    engine = PROVIDER.open(tmp_path, "f32", 1, 1).engine(300, 1)
    library.full = "out of memory"
    with pytest.raises(EngineError, match="GPU 1: no memory for the engine of 300 tokens"):
        engine.run(INPUTS)
