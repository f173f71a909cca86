"""What provider tensorrt asks of the library, which is not installed: a fake that records it stands for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shapeshift.engines.interfaces import INPUT_AXES
from shapeshift.engines.providers import tensorrt
from shapeshift.engines.providers.tensorrt import PROVIDER
from shapeshift.errors import EngineError
from tests.engines.driver import Driver, Management, install

Shapes = dict[str, tuple[tuple[int, ...], ...]]


class FakeTensorRt:
    """Builds a plan of a text model from any file; `shapes`: least, usual and largest of each input; `flags`.

    taken: the timing caches that a build began with, of which it refuses one of another device.
    """

    Logger: Any = type("Logger", (), {"WARNING": 0, "__init__": lambda self, level: None})
    BuilderFlag = SimpleNamespace(BF16="bf16", FP16="fp16", TF32="tf32")

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
            create_network=lambda flags: network,
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
    assert library.shapes["INPUT_IDS"] == ((1, 1), (1, 2048), (1, 2048))
    assert library.shapes["ROWS"] == ((1,), (16,), (16,))
    assert library.flags == {"fp16", "tf32"} and (tmp_path / "dynamic.plan").read_bytes() == b"plan"


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
