"""Plans of TensorRT as they are loaded and run, on fakes of the library and of a GPU's streams."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shapeshift.engines import cuda_device
from shapeshift.engines.providers import tensorrt
from shapeshift.engines.providers.tensorrt import TensorRtEngine, TensorRtRuntime
from shapeshift.errors import EngineError

MIB = 2**20


class FakeLibrary:
    """Reads plans that begin with `plan`; an engine takes IDS and gives OUT, [rows, 2]. calls: of its context, by name.

    works: whether an execution succeeds.
    """

    Logger: Any = type("Logger", (), {"WARNING": 0, "__init__": lambda self, level: None})
    TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
    __version__ = "10"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.works = True

    def Runtime(self, logger: object) -> Any:  # noqa: N802  the library's name
        return SimpleNamespace(deserialize_cuda_engine=lambda plan: self._engine() if plan[:4] == b"plan" else None)

    def _engine(self) -> Any:
        names = ["OUT", "IDS"]
        return SimpleNamespace(
            num_io_tensors=len(names),
            get_tensor_name=names.__getitem__,
            get_tensor_mode=lambda name: "input" if name == "IDS" else "output",
            device_memory_size_v2=3 * MIB,
            create_execution_context=lambda: SimpleNamespace(
                set_input_shape=lambda *given: self.calls.append(("shape", *given)),
                set_tensor_address=lambda name, address: self.calls.append(("address", name)),
                get_tensor_shape=lambda name: (2, 2),
                execute_async_v3=self._execute,
            ),
        )

    def _execute(self, stream: object) -> bool:
        self.calls.append(("execute", stream))
        return self.works


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary()
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.calls.append(("device", device.index)))
    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: made.calls.append(("synchronize",)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda own: contextlib.nullcontext())
    return made


@pytest.fixture
def engine(library: FakeLibrary, tmp_path: Path) -> TensorRtEngine:
    (tmp_path / "8.plan").write_bytes(b"plan".ljust(MIB, b"0"))
    made = TensorRtEngine(tmp_path / "8.plan", 8, 2, 5)
    made._device = torch.device("cpu")
    return made


def test_a_plan_is_loaded_on_its_device_and_takes_its_file_and_what_it_computes_in(
    library: FakeLibrary, engine: TensorRtEngine
) -> None:
    assert library.calls == [("device", 5)]
    assert (engine.tokens, engine.rows, engine.used_mb) == (8, 2, 4.0)


def test_a_plan_of_another_gpu_or_version_is_named(library: FakeLibrary, tmp_path: Path) -> None:
    (tmp_path / "8.plan").write_bytes(b"other")
    with pytest.raises(EngineError, match=r"8.plan was built for another GPU or TensorRT version \(here 10\)"):
        TensorRtEngine(tmp_path / "8.plan", 8, 2, 0)


def test_inputs_have_their_shapes_and_outputs_come_when_the_stream_has_ended(
    library: FakeLibrary, engine: TensorRtEngine
) -> None:
    library.calls.clear()
    found = engine.run({"IDS": np.zeros((1, 8), np.int64), "OTHER": np.zeros(1)})
    assert library.calls == [
        ("shape", "IDS", (1, 8)),
        ("address", "IDS"),
        ("address", "OUT"),
        ("execute", 7),
        ("synchronize",),
    ]
    assert list(found) == ["OUT"] and found["OUT"].shape == (2, 2) and found["OUT"].dtype == np.float32


def test_an_execution_that_fails_is_an_error(library: FakeLibrary, engine: TensorRtEngine) -> None:
    library.works = False
    with pytest.raises(EngineError, match="TensorRT reported a failed execution"):
        engine.run({"IDS": np.zeros((1, 8), np.int64)})


@pytest.mark.parametrize(("tokens", "name"), [(None, "dynamic.plan"), (8, "8.plan")])
def test_there_must_be_room_for_a_plan_and_all_of_them_count(
    library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int | None, name: str
) -> None:
    wanted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda_device, "require_free", lambda *given: wanted.append(given))
    (tmp_path / name).write_bytes(b"plan".ljust(2 * MIB, b"0"))
    runtime = TensorRtRuntime(tmp_path, 5)
    assert runtime.used_mb() == 0.0
    for count in (1, 2):
        runtime.engine(tokens, None)
        assert runtime.used_mb() == count * 5.0
    assert wanted == [(5, 2.0, f"the plan {tmp_path / name}")] * 2
    assert tensorrt.plan_name(tokens) == name
