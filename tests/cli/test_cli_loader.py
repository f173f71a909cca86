"""Models that a running server loads while others are built."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from shapeshift.cli.running.server import Loader
from shapeshift.engines import capacity
from shapeshift.engines.capacity import Machine
from shapeshift.errors import EngineError

GENERATES = {"checkpoint": "c", "checkpoint_sha256": "1", "precision": "bf16", "max_length": "8192"}
MEMORY = '{"engines": 100, "KV": 5000, "adapters": 0}'


def add(repository: Path, name: str, parameters: Mapping[str, str]) -> None:
    (repository / name).mkdir()
    values = "".join(
        f"parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}\n" for key, value in parameters.items()
    )
    (repository / name / "config.pbtxt").write_text(f"backend: 'fused_decode'\n{values}")


def test_models_are_loaded_while_others_are_given_and_failures_are_named(tmp_path: Path) -> None:
    for name in ("good", "bad", "later"):
        add(tmp_path, name, {})
    for name in ("good", "bad"):
        add(tmp_path, f"{name}_unary", {"forward_to": name})
    loads, said, go_on = list[str](), list[str](), threading.Event()

    def load(name: str) -> None:
        loads.append(name)
        assert go_on.wait(60)
        if name == "bad":
            raise EngineError("cannot load bad: no such head\nTraceback")

    with Loader(load, tmp_path, said.append) as loader:
        for name in ("good", "bad", "later", "good_unary", "bad_unary"):
            loader.start(name)
        go_on.set()
    assert set(loads) == {"good", "bad", "later", "good_unary"}
    assert loader.loaded == {"good", "later", "good_unary"}
    assert sorted(said) == [
        "skipping bad, which could not be loaded: cannot load bad: no such head",
        "skipping bad_unary: it needs bad",
    ]


def test_what_does_not_fit_beside_those_that_are_being_loaded_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "this_machine", lambda: Machine(2, 8000.0))
    for name in ("first", "second"):
        add(tmp_path, name, GENERATES | {"device_memory": MEMORY, "max_concurrency": "4"})
    said, loading, refused = list[str](), threading.Event(), threading.Event()

    def load(name: str) -> None:
        loading.set()
        assert name == "first" and refused.wait(60)

    def say(text: str) -> None:
        said.append(text)
        refused.set()

    with Loader(load, tmp_path, say) as loader:
        loader.start("first")
        assert loading.wait(60)
        loader.start("second")
    assert loader.loaded == {"first"}
    assert len(said) == 1 and said[0].startswith("skipping second, which does not fit: ")


def test_without_a_server_nothing_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "--load", "--build", str(tmp_path)]) == 2
    assert "--load: no server runs on" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
