"""What `shapeshift serve` says of memory before it starts a server. The driver and NVML are fakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shapeshift.cli.checks import memory
from shapeshift.engines import hardware
from shapeshift.errors import UnsupportedError
from shapeshift.triton import model_config
from tests.engines.driver import Driver, Management, install


def add(repository: Path, name: str, group: str, **parameters: str) -> None:
    folder = repository / name
    folder.mkdir(parents=True)
    given = "".join(
        f"parameters [ {{ key: '{key}' value {{ string_value: '{value}' }} }} ]\n" for key, value in parameters.items()
    )
    (folder / "config.pbtxt").write_text(f"name: '{name}'\ninstance_group [ {{ {group} }} ]\n{given}")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A front whose two workers have a GPU each, and a model on the first of them."""
    install(monkeypatch, Driver(2), Management([10_000, 2000]))
    monkeypatch.setattr(hardware, "gpus", lambda: 2)
    add(tmp_path, "encode", "kind: KIND_CPU", workers="2")
    for number in range(3):
        memory_of = '{"engines": 400, "graphs": 88}'
        add(tmp_path, f"encode_w0{number}", f"kind: KIND_GPU gpus: [ {number % 2} ]", device_memory=memory_of)
    add(
        tmp_path, "generate", "kind: KIND_GPU gpus: [ 0 ]", device_memory='{"engines": 2000, "KV": 6000, "graphs": 400}'
    )
    return tmp_path


def test_the_plan_is_printed_at_start(repository: Path) -> None:
    host, *plan = memory.plan([repository], ["encode", "generate"]).splitlines()
    assert "MiB available; weights in MiB: none" in host
    assert plan == [
        "GPU 0 (H100): 9912 MiB are wanted, 10000 of 81920 MiB are free",
        "  encode_w00: 1000 MiB (engines 400, graphs 88, context 512)",
        "  generate: 8912 MiB (engines 2000, KV 6000, graphs 400, context 512)",
        "GPU 1 (H100): 1000 MiB are wanted, 2000 of 81920 MiB are free",
        "  encode_w01: 1000 MiB (engines 400, graphs 88, context 512)",
    ]


def test_two_models_beyond_the_memory_of_a_gpu_are_not_started(repository: Path) -> None:
    add(repository, "chat", "kind: KIND_GPU gpus: [ 1 ]", device_memory='{"engines": 900}')
    with pytest.raises(
        UnsupportedError, match=r"GPU 1 \(H100\): chat wants 1412 MiB .*; 1000 MiB are left of the plan, 2000"
    ):
        memory.plan([repository], ["encode", "generate", "chat"])
    assert "chat" in memory.plan([repository], ["chat"])


def test_a_gpu_that_is_not_there_is_said_before_anything_starts(repository: Path) -> None:
    add(repository, "chat", "kind: KIND_GPU gpus: [ 4 ]")
    with pytest.raises(
        UnsupportedError, match="GPU 4: the NVIDIA driver shows 2 devices, numbered from 0; name another"
    ):
        memory.plan([repository], ["chat"])


def test_triton_starts_a_process_for_each_gpu_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: 3)
    for group, wanted in (
        ("kind: KIND_GPU", [0, 1, 2]),
        ("kind: KIND_GPU gpus: [ 2 ] count: 2", [2, 2]),
        ("kind: KIND_CPU", []),
    ):
        add(tmp_path / group, "one", group)
        assert memory.devices_of(model_config.read(tmp_path / group / "one" / "config.pbtxt")) == wanted
