"""What provider onnxruntime_tensorrt asks of ONNX Runtime, which stands here as a fake that records it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from shapeshift.engines import gpu, hardware, verify
from shapeshift.engines.interfaces import INPUT_AXES, PROVIDERS
from shapeshift.engines.providers import lookup, onnxruntime_tensorrt
from shapeshift.engines.providers.onnxruntime_tensorrt import PROFILE_FILE, PROVIDER
from shapeshift.errors import EngineError, UnsupportedError
from tests.engines.driver import Driver, install
from tests.engines.test_engines_onnxruntime import CUDA, FakeOnnxRuntime

TENSORRT = "TensorrtExecutionProvider"


class FakeTensorRtProvider(FakeOnnxRuntime):
    """Builds an engine for each session, in the folder that the options name."""

    def InferenceSession(self, file: str, options: Any, providers: list[Any]) -> Any:  # noqa: N802
        session = super().InferenceSession(file, options, providers)
        (name, own), (fallback, _) = providers
        assert (name, fallback) == (TENSORRT, CUDA)
        (Path(own["trt_engine_cache_path"]) / "graph.engine").write_bytes(bytes(1 << 20))
        return session


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRtProvider:
    made = FakeTensorRtProvider([TENSORRT, CUDA, "CPUExecutionProvider"])
    monkeypatch.setitem(sys.modules, "onnxruntime", made)
    install(monkeypatch, Driver(3))
    monkeypatch.setattr(onnxruntime_tensorrt, "TIMINGS", tmp_path / "cache" / "timings")
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an ONNX file that has the inputs of a text model."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, [axes.get(axis, 1) for axis in range(max(axes) + 1)])
        for name, axes in ((name, dict(axes)) for name, axes in INPUT_AXES.items())
    ]
    output = helper.make_tensor_value_info("EMBEDDING", TensorProto.INT64, ["rows"])
    node = helper.make_node("Identity", ["ROWS"], ["EMBEDDING"])
    onnx.save(helper.make_model(helper.make_graph([node], "text", inputs, [output])), tmp_path / "model.onnx")
    return tmp_path


def test_a_static_length_is_a_graph_with_an_engine_of_its_own(folder: Path, library: FakeTensorRtProvider) -> None:
    runtime = PROVIDER.open(folder, "f16", 1, 1)
    assert PROVIDER.compile(folder, "f16", 8, 2) == "model.onnx" and not (folder / PROFILE_FILE).exists()
    engines = [runtime.engine(tokens, 2) for tokens in (8, 16)]
    (own, cuda), second = library.asked[0], library.asked[1]
    assert own[1] == {
        "device_id": "1",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": str(folder / "tensorrt" / "8"),
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": str(onnxruntime_tensorrt.TIMINGS),
        "trt_cuda_graph_enable": "1",
    }
    assert cuda == (CUDA, {"device_id": 1})
    assert second[0][1]["trt_engine_cache_path"] == str(folder / "tensorrt" / "16"), "one graph, two engines"
    assert runtime.used_mb() == 2 and onnxruntime_tensorrt.TIMINGS.is_dir()
    segments, rows = np.array([[1, 1, 1, 2, 2, 0, 0, 0]]), np.array([1, 2])
    inputs = {"INPUT_IDS": np.arange(8)[None], "SEGMENTS": segments, "POSITIONS": segments, "ROWS": rows}
    np.testing.assert_array_equal(engines[0].run(inputs)["EMBEDDING"], [[3, 3], [7, 7]])


def test_the_engine_of_any_shape_has_a_profile(folder: Path, library: FakeTensorRtProvider) -> None:
    PROVIDER.compile(folder, "bf16", None, None, 2048)
    least, usual, most = (
        "INPUT_IDS:1x1,SEGMENTS:1x1,POSITIONS:1x1,ROWS:1",
        "INPUT_IDS:1x128,SEGMENTS:1x128,POSITIONS:1x128,ROWS:4",
        "INPUT_IDS:1x2048,SEGMENTS:1x2048,POSITIONS:1x2048,ROWS:16",
    )
    profile = {"trt_profile_min_shapes": least, "trt_profile_opt_shapes": usual, "trt_profile_max_shapes": most}
    assert json.loads((folder / PROFILE_FILE).read_text()) == profile
    PROVIDER.open(folder, "bf16", 1).engine(None, None)
    own = library.asked[0][0][1]
    assert own | profile == own and "trt_cuda_graph_enable" not in own


def test_without_tensorrt_nothing_else_is_taken_silently(folder: Path, library: FakeTensorRtProvider) -> None:
    library.loads = False
    with pytest.raises(EngineError, match="GPU 2: ONNX Runtime cannot load TensorrtExecutionProvider"):
        PROVIDER.open(folder, "f32", 1, 2).engine(8, 2)
    library.providers.remove(TENSORRT)
    with pytest.raises(UnsupportedError, match=r"GPU 2: this onnxruntime 1.31 has no TensorRT; .*; to use the CPU"):
        PROVIDER.open(folder, "f32", 1, 2)


def test_it_is_a_provider_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "describe", lambda device: SimpleNamespace(has_bf16=False))
    assert PROVIDERS["onnxruntime_tensorrt"] is PROVIDER
    assert lookup.usable(PROVIDER.name, [1]) == [1]
    assert hardware.resolve_precision("auto", PROVIDER.name, 1) == "f16" and "f16" in verify.MIN_COSINE
