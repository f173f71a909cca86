"""What `shapeshift serve` says of memory before it starts a server. The driver and NVML are fakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shapeshift.cli.running import memory
from shapeshift.cli.served_models import without_misfits
from shapeshift.engines import hardware
from shapeshift.engines.capacity import Machine
from shapeshift.errors import UnsupportedError
from shapeshift.triton import model_config
from tests.engines.driver import Driver, Management, install


def add(repository: Path, name: str, group: str, backend: str = "", **parameters: str) -> None:
    folder = repository / name
    folder.mkdir(parents=True)
    given = "".join(
        f"parameters [ {{ key: '{key}' value {{ string_value: '{value}' }} }} ]\n" for key, value in parameters.items()
    )
    (folder / "config.pbtxt").write_text(
        f"name: '{name}'\nbackend: '{backend}'\ninstance_group [ {{ {group} }} ]\n{given}"
    )


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A front whose two workers have a GPU each, and a model on the first of them."""
    install(monkeypatch, Driver(2), Management([10_000, 2000]))
    monkeypatch.setattr(hardware, "gpus", lambda: 2)
    add(tmp_path, "encode", "kind: KIND_CPU", workers="2")
    for number in range(3):
        memory_of = '{"engines": 400, "graphs": 88}'
        add(
            tmp_path,
            f"encode_w0{number}",
            f"kind: KIND_GPU gpus: [ {number % 2} ]",
            device_memory=memory_of,
            worker_of="encode",
        )
    add(
        tmp_path, "generate", "kind: KIND_GPU gpus: [ 0 ]", device_memory='{"engines": 2000, "KV": 6000, "graphs": 400}'
    )
    return tmp_path


def test_the_plan_is_printed_at_start(repository: Path) -> None:
    lines, refused = memory.plan([repository], ["encode", "generate"])
    host, *plan = lines.splitlines()
    assert "MiB available; models in MiB: none" in host and refused == {}
    assert plan == [
        "GPU 0 (H100): 9912 MiB are wanted, 10000 of 81920 MiB are free",
        "  encode_w00: 1000 MiB (engines 400, graphs 88, context 512)",
        "  generate: 8912 MiB (engines 2000, KV 6000, graphs 400, context 512)",
        "GPU 1 (H100): 1000 MiB are wanted, 2000 of 81920 MiB are free",
        "  encode_w01: 1000 MiB (engines 400, graphs 88, context 512)",
    ]


def test_two_models_beyond_the_memory_of_a_gpu_are_not_started(repository: Path) -> None:
    add(repository, "chat", "kind: KIND_GPU gpus: [ 1 ]", device_memory='{"engines": 900}')
    lines, refused = memory.plan([repository], ["encode", "generate", "chat"])
    assert "  generate: " in lines and "  chat: " not in lines and list(refused) == ["chat"]
    text = r"GPU 1 \(H100\): chat wants 1412 MiB .*; 1000 MiB are left of the plan, 2000"
    assert re.match(text, refused["chat"])
    assert "  chat: " in memory.plan([repository], ["chat"])[0]


def test_a_gpu_that_is_not_there_is_said_before_anything_starts(repository: Path) -> None:
    add(repository, "chat", "kind: KIND_GPU gpus: [ 4 ]")
    refused = memory.plan([repository], ["chat"])[1]
    assert refused["chat"].startswith("GPU 4: the NVIDIA driver shows 2 devices, numbered from 0; name another")


GENERATES = {"checkpoint": "c", "checkpoint_sha256": "1", "precision": "bf16", "max_length": "8192"}


@pytest.fixture
def generators(tmp_path: Path) -> Path:
    """For a machine of 1000 MiB `a` is too large, `b` and `c` fit, with the same weights; `a_unary` calls `a`."""
    for name, memory_of, stated in (
        ("a", '{"engines": 200, "KV": 40960}', {"max_concurrency": "4096"}),
        ("b", '{"engines": 500, "KV": 100}', {}),
        ("c", '{"engines": 500, "KV": 100, "adapters": 50}', {}),
    ):
        add(tmp_path, name, "kind: KIND_CPU", "fused_decode", device_memory=memory_of, **GENERATES, **stated)
    add(tmp_path, "a_unary", "kind: KIND_CPU", "fused_decode", forward_to="a")
    return tmp_path


def test_a_generator_that_does_not_fit_is_named_with_what_fits(generators: Path) -> None:
    free = memory.Free(Machine(2, 1000.0))
    lines, refused = memory.plan([generators], ["a", "a_unary", "b", "c"], free)
    assert "2 cores, 1000 MiB available; models in MiB: a 41160, b 600, c 650" in lines
    most = "max_concurrency: got 4096; at most 80 with max_length 8192 in 1000 MiB (left for it)"
    assert refused == {"a": most}


def test_serve_leaves_out_what_does_not_fit_and_what_calls_it(
    generators: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"a": "it is large"}
    assert without_misfits(["a", "a_unary", "b"], refused, [generators], strict=False) == ["b"]
    assert capsys.readouterr().err.splitlines() == [
        "shapeshift serve: skipping a, which does not fit: it is large",
        "shapeshift serve: skipping a_unary, which does not fit: needs a",
    ]
    for models, strict in ((["a", "b"], True), (["a", "a_unary"], False)):
        with pytest.raises(UnsupportedError, match="a does not fit: it is large"):
            without_misfits(models, refused, [generators], strict)


def test_triton_starts_a_process_for_each_gpu_of_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: 3)
    for group, wanted in (
        ("kind: KIND_GPU", [0, 1, 2]),
        ("kind: KIND_GPU gpus: [ 2 ] count: 2", [2, 2]),
        ("kind: KIND_CPU", []),
    ):
        add(tmp_path / group, "one", group)
        assert memory.devices_of(model_config.read(tmp_path / group / "one" / "config.pbtxt")) == wanted
