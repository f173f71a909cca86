"""What provider tensorrt asks of the library, which is not installed: a fake that records it stands for it, and the
names are held against the bindings of two releases."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from shapeshift.engines.interfaces import INPUT_AXES
from shapeshift.engines.providers import onnx_precision, tensorrt
from shapeshift.engines.providers.tensorrt import PROVIDER
from shapeshift.errors import EngineError
from tests.docs.docs_pages import PROJECT
from tests.engines.driver import Driver, Management, install

Shapes = dict[str, tuple[tuple[int, ...], ...]]


class FakeTensorRt:
    """Builds a plan of a text model from any file; `shapes`: least, usual and largest of each input; `flags`.

    taken: the timing caches that a build began with, of which it refuses one of another device.
    """

    Logger: Any = type("Logger", (), {"WARNING": 0, "__init__": lambda self, level: None})
    # As in release 11: the flags of precisions are gone.
    BuilderFlag = SimpleNamespace(TF32="tf32")
    NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)

    def __init__(self) -> None:
        self.shapes: Shapes = {}
        self.flags: set[str] = {"tf32"}
        self.taken: list[bytes] = []

    def Builder(self, logger: object) -> Any:  # noqa: N802  the library's name
        inputs = [_input(name, dict(axes)) for name, axes in INPUT_AXES.items()]
        self.network = network = SimpleNamespace(num_inputs=len(inputs), get_input=inputs.__getitem__)
        config = SimpleNamespace(
            set_flag=self.flags.add,
            clear_flag=self.flags.discard,
            add_optimization_profile=lambda profile: None,
            create_timing_cache=lambda content: None if content == b"damaged" else content,
            set_timing_cache=self._take,
            get_timing_cache=lambda: SimpleNamespace(serialize=lambda: self.taken[-1] + b"!"),
        )
        profile = SimpleNamespace(set_shape=lambda name, *shapes: self.shapes.update({name: shapes}))
        return SimpleNamespace(
            create_network=lambda flags: network if flags == 2 else pytest.fail("weakly typed"),
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: profile,
            build_serialized_network=lambda network, config: b"plan",
        )

    def _take(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache == b"other device":
            return False
        self.taken.append(cache)
        return True

    def OnnxParser(self, network: object, logger: object) -> Any:  # noqa: N802  the library's name
        return SimpleNamespace(parse_from_file=lambda path: True)


def _input(name: str, axes: dict[int, str]) -> Any:
    rank = max(axes) + 1
    shape = tuple(-1 if axis in axes else 1 for axis in range(rank))
    return SimpleNamespace(name=name, shape=shape, get_dimension_name=lambda axis: axes.get(axis, ""))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTensorRt:
    made = FakeTensorRt()
    monkeypatch.setattr(tensorrt, "TIMING_CACHE", tmp_path / "cache" / "timings")
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    return made


def test_the_engine_of_any_shape_takes_the_longest_text(tmp_path: Path, library: FakeTensorRt) -> None:
    assert PROVIDER.compile(tmp_path, "f16", None, None, 2048) == "dynamic.plan"
    assert library.shapes["INPUT_IDS"] == ((1, 1), (1, 128), (1, 2048)), "tuned for a usual length"
    assert library.shapes["ROWS"] == ((1,), (4,), (16,))
    assert PROVIDER.compile(tmp_path, "f16", None, None, 64) == "dynamic.plan"
    assert library.shapes["INPUT_IDS"] == ((1, 1), (1, 64), (1, 64)), "no text is as long as the usual ones"
    assert (tmp_path / "dynamic.plan").read_bytes() == b"plan"


def test_a_static_engine_has_one_shape(tmp_path: Path, library: FakeTensorRt) -> None:
    assert PROVIDER.compile(tmp_path, "f32", 64, 8, 2048) == "64.plan"
    network = library.network
    shapes = {one.name: one.shape for one in map(network.get_input, range(network.num_inputs))}
    assert shapes == {"INPUT_IDS": (1, 64), "SEGMENTS": (1, 64), "POSITIONS": (1, 64), "ROWS": (8,)}
    assert not library.shapes, "the plan itself has the shape, not a profile"
    assert not library.flags, "f32 is not TF32"


def test_the_timings_of_kernels_are_kept_between_builds(tmp_path: Path, library: FakeTensorRt) -> None:
    for _ in range(2):
        PROVIDER.compile(tmp_path, "f16", 64, 8)
    assert library.taken == [b"", b"!"] and tensorrt.TIMING_CACHE.read_bytes() == b"!!"
    for useless in (b"other device", b"damaged"):
        tensorrt.TIMING_CACHE.write_bytes(useless)
        PROVIDER.compile(tmp_path, "f16", 64, 8)
        assert library.taken[-1] == b"" and tensorrt.TIMING_CACHE.read_bytes() == b"!"


def test_a_plan_that_has_no_room_to_compute_in_is_an_error_with_figures(
    tmp_path: Path, library: FakeTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, Driver(2), Management([70_000, 500]))
    full = SimpleNamespace(create_execution_context=lambda: None, device_memory_size_v2=600 << 20)
    monkeypatch.setattr(
        library, "Runtime", lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: full), raising=False
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    (tmp_path / "64.plan").touch()
    wanted = r"GPU 1: no memory for what 64.plan computes in: 600 MiB are wanted, 500 MiB are free; .*; to use the CPU"
    with pytest.raises(EngineError, match=wanted):
        tensorrt.TensorRtEngine(tmp_path / "64.plan", 64, 8, 1)


def test_timings_that_cannot_be_kept_stop_no_build(
    tmp_path: Path, library: FakeTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tensorrt, "TIMING_CACHE", tmp_path / "file" / "timings")
    assert PROVIDER.compile(tmp_path, "f16", 64, 8) == "64.plan"


class Text(nn.Module):
    """As `PackedEncoder`, but of two matrices, one of which chooses by comparing."""

    input_axes = INPUT_AXES
    output_names = ("EMBEDDING",)
    f32_modules = ("choice",)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.choice = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, input_ids: torch.Tensor, segments: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        words = self.words(input_ids)
        vectors = (self.layer(words) + self.choice(words))[0] * (segments[0, :, None] + positions[0, :, None])
        return vectors.index_select(0, rows)


@pytest.mark.parametrize(("precision", "element"), [("f32", "FLOAT"), ("bf16", "BFLOAT16"), ("f16", "FLOAT16")])
def test_the_types_of_the_graph_are_the_precision(tmp_path: Path, precision: str, element: str) -> None:
    torch.manual_seed(0)
    module, ids = Text(), np.arange(5)[None]
    example = {name: np.arange(2) if name == "ROWS" else ids for name in INPUT_AXES}
    assert PROVIDER.export(module, example, tmp_path, precision) == ["model.onnx"]
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {one.name: one.type.tensor_type.elem_type for one in (*graph.value_info, *graph.input, *graph.output)}
    types |= {one.name: one.data_type for one in graph.initializer}
    products = {node.name: {types[name] for name in node.input} for node in graph.node if node.op_type == "MatMul"}
    low = onnx.TensorProto.DataType.Value(element)
    assert products == {"/layer/MatMul": {low}, "/choice/MatMul": {onnx.TensorProto.FLOAT}}
    if precision != "bf16":
        # ONNX Runtime has no such kernels in bf16 on a CPU.
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        with torch.no_grad():
            expected = module(*(torch.from_numpy(example[name]) for name in INPUT_AXES))
        feed = {one.name: example[one.name] for one in session.get_inputs()}
        tolerance = 0.02 if precision == "f16" else 1e-5
        np.testing.assert_allclose(session.run(None, feed)[0], expected, rtol=0, atol=tolerance)


def test_weights_beside_the_graph_are_lowered_too(tmp_path: Path) -> None:
    module, ids = Text(), np.arange(5)[None]
    example = {name: np.arange(2) if name == "ROWS" else ids for name in INPUT_AXES}
    PROVIDER.export(module, example, tmp_path, "f32")
    file = tmp_path / "model.onnx"
    beside: dict[str, Any] = {"all_tensors_to_one_file": False, "size_threshold": 0}
    onnx.save(onnx.load(file), file, save_as_external_data=True, **beside)
    assert len([*tmp_path.iterdir()]) > 1
    onnx_precision.lower(file, "bf16", module.f32_modules)
    assert [*tmp_path.iterdir()] == [file], "no weights that nothing reads are left"
    stored = {one.data_type for one in onnx.load(file).graph.initializer}
    assert {onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT} <= stored


def asked_of_the_library() -> set[str]:
    """The names that `tensorrt.py` takes from the library and from its objects."""
    objects = {
        "tensorrt",
        "builder",
        "network",
        "parser",
        "config",
        "profile",
        "cache",
        "_engine",
        "_context",
        "_runtime",
    }
    names = set()
    for node in ast.walk(ast.parse(Path(tensorrt.__file__).read_text())):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
            *path, name = ast.unparse(node).split(".")
            names |= {name} if objects.intersection(path) else set()
    return names


@pytest.mark.parametrize("version", ["10.13.3.9", "11.4.0.106"])
def test_the_library_has_what_is_asked_of_it(version: str) -> None:
    """The bindings alone cannot be imported, but their file holds every name."""
    names = asked_of_the_library()
    assert {"OnnxParser", "INPUT", "num_errors", "set_timing_cache", "execute_async_v3"} <= names
    folder = PROJECT / "build" / "tensorrt_bindings"
    pattern = f"tensorrt_cu12_bindings-{version}-*.whl"
    if not list(folder.glob(pattern)):
        options = ["--no-deps", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", *options, f"tensorrt-cu12-bindings=={version}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no package index with tensorrt-cu12-bindings")
    with zipfile.ZipFile(next(folder.glob(pattern))) as wheel:
        [library] = [name for name in wheel.namelist() if re.search(r"/tensorrt[^/]*\.so$", name)]
        content = wheel.read(library)
    # The linker keeps a name that ends another one only there.
    assert {name for name in names | {"no_such_name"} if name.encode() + b"\0" not in content} == {"no_such_name"}
