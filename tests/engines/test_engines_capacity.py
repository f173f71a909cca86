"""What models ask for, against what the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.engines import capacity
from shapeshift.engines.capacity import Ask, Machine
from shapeshift.engines.manifest import EngineEntry, FileEntry, Manifest, Output
from shapeshift.errors import UnsupportedError

MIB = 2**20


def manifest_of(sizes: dict[str, int], engines: int) -> Manifest:
    """A manifest of engines that share these files."""
    entries = tuple(EngineEntry("model.xml", tokens, 1, 0.0, 1.0, ()) for tokens in range(engines))
    files = {name: FileEntry(size, "") for name, size in sizes.items()}
    outputs = (Output("EMBEDDING", "TYPE_FP32", (8,)),)
    return Manifest("m", "", "", "openvino", "", "f32", 9, 64, True, 0, "", "", "", outputs, files, entries)


def weights(folder: Path, mib: int) -> None:
    """A file of that size, without its blocks on disk."""
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(mib * MIB)


def test_a_model_that_does_not_fit_is_named_before_it_loads() -> None:
    asks = [Ask("first", 13000.0), Ask("second", 13000.0)]
    with pytest.raises(UnsupportedError) as caught:
        capacity.require_fit(asks, Machine(2, 24000.0))
    assert str(caught.value).startswith("memory: second: asks for at least 13000 MiB; 11000 of 24000 MiB are left")
    capacity.require_fit(asks, Machine(2, 26000.0))
    line = "2 cores, 26000 MiB available; models in MiB: first 13000, second 13000"
    assert capacity.fit(asks, Machine(2, 26000.0)) == (line, {})


def test_what_does_not_fit_takes_nothing_from_those_behind_it() -> None:
    asks = [Ask("first", 10), Ask("large", 91, refusal=lambda left: f"at most {left:.0f}"), Ask("third", 90)]
    assert capacity.fit(asks, Machine(2, 100))[1] == {"large": "at most 90"}


def test_weights_that_processes_map_together_count_once() -> None:
    asks = [Ask("one", 70, "weights", 60), Ask("two", 75, "weights", 60), Ask("other", 15, "", 15)]
    assert capacity.fit(asks, Machine(2, 100))[1] == {}
    refused = capacity.fit(asks, Machine(2, 99))[1]
    assert list(refused) == ["other"] and "14 of 99 MiB" in refused["other"]


@pytest.mark.parametrize(
    ("parameters", "mib"),
    [
        ({}, 4 * 10),
        ({"precision": "bf16"}, 4 * 5),
        ({"placement": "resident", "workers": "3"}, 3 * 4 * 10),
        ({"placement": "partitioned", "workers": "3"}, 3 * 10),
        ({"worker_of": "model"}, 0),
        ({"device_memory": "{}"}, 0),
        ({"provider": "native", "precision": "bf16", "placement": "resident", "workers": "3"}, 10),
        ({"provider": "native", "adapter_mb": "7"}, 17),
    ],
)
def test_each_text_engine_holds_weights_of_its_own(tmp_path: Path, parameters: dict[str, str], mib: float) -> None:
    made = manifest_of({"model.bin": 10 * MIB}, engines=4)
    (tmp_path / "engines").mkdir()
    made.save(tmp_path / "engines")
    parameters = {"engines": "engines", **parameters}
    assert capacity.ask_of("model", tmp_path, parameters) == Ask("model", mib)
    # No further engine is loaded above `memory_mb`, but the first one always.
    limited = capacity.ask_of("model", tmp_path, parameters, limit_mb=25)
    assert limited.memory_mb == min(mib, 25 * int(parameters.get("workers", "1")))
    if limited.refusal is not None:
        assert (
            capacity.fit([limited], Machine(2, 24))[1]
            .get("model", "")
            .startswith("memory_mb: got 25; at most 24," if mib == 40 else "asks for at least" if mib == 120 else "")
        )


@pytest.mark.parametrize(
    ("parameters", "mib"),
    [
        ({"engines": "../engines"}, 3),
        ({"engines": "../engines", "checkpoint": "../checkpoint"}, 3),
        ({"checkpoint": "../checkpoint"}, 5),
        ({"checkpoint": "../checkpoint", "adapter_mb": "7"}, 12),
        ({"engines": "../engines", "precision": "bf16"}, 1.5),
        ({"checkpoint": "../checkpoint", "precision": "bf16"}, 5),
        ({"checkpoint": "../checkpoint", "precision": "int8"}, 2.5),
        ({"engines": "../engines", "placement": "resident", "workers": "4"}, 12),
        ({"forward_to": "other"}, 0),
        ({"checkpoint": "../absent"}, 0),
    ],
)
def test_a_model_asks_for_its_weights(tmp_path: Path, parameters: dict[str, str], mib: float) -> None:
    weights(tmp_path / "engines" / "gamma_0", 3)
    weights(tmp_path / "checkpoint", 5)
    (tmp_path / "checkpoint" / "config.json").write_text('{"torch_dtype": "float16"}')
    (tmp_path / "model").mkdir()
    assert capacity.ask_of("model", tmp_path / "model", parameters) == Ask("model", mib)


def test_copies_of_weights_do_not_count(tmp_path: Path) -> None:
    weights(tmp_path / "checkpoint", 5)
    for name in ("consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx"):
        (tmp_path / "checkpoint" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "checkpoint" / name).write_bytes(bytes(MIB))
    assert capacity.ask_of("model", tmp_path, {"checkpoint": "checkpoint"}) == Ask("model", 5)
