"""Models that a running server loads while others are built."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from shapeshift.cli.running.server import Loader
from shapeshift.engines import capacity
from shapeshift.engines.capacity import Machine
from shapeshift.errors import EngineError, ModelGoneError

GENERATES = {"checkpoint": "c", "checkpoint_sha256": "1", "precision": "bf16", "max_length": "8192"}


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


@pytest.mark.parametrize(("returns_s", "loaded"), [(600.0, {"good"}), (0.0, set())], ids=["back in time", "too late"])
def test_a_server_that_is_started_again_loads_what_is_built_meanwhile(
    tmp_path: Path, returns_s: float, loaded: set[str]
) -> None:
    add(tmp_path, "good", {})
    answers, said = [ModelGoneError("no server answers"), ModelGoneError("socket closed"), None], list[str]()

    def load(name: str) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    with Loader(load, tmp_path, said.append, returns_s) as loader:
        loader.start("good")
    assert loader.loaded == loaded
    assert said == ([] if loaded else ["skipping good, which could not be loaded: no server answers"])


def test_an_error_beside_it_ends_the_wait_for_a_server(tmp_path: Path) -> None:
    add(tmp_path, "good", {})
    is_away, said = threading.Event(), list[str]()

    def load(name: str) -> None:
        is_away.set()
        raise ModelGoneError("no server answers")

    with pytest.raises(KeyboardInterrupt), Loader(load, tmp_path, said.append, 600.0) as loader:
        loader.start("good")
        assert is_away.wait(60)
        raise KeyboardInterrupt
    assert loader.loaded == set()


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [({}, {"KV": 3800}, True), ({}, {}, False), ({"engines": 7000, "KV": 1000}, {"engines": 7000, "KV": 1000}, True)],
    ids=["beside what has taken a part", "beside what will take it", "with shared weights"],
)
@pytest.mark.parametrize("is_loaded", [False, True], ids=["loading", "loaded"])
def test_what_fits_beside_others_is_no_matter_of_what_they_have_taken_by_then(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: Mapping[str, float],
    second: Mapping[str, float],
    fits: bool,
    is_loaded: bool,
) -> None:
    free_mb = [10_000.0]
    monkeypatch.setattr(capacity, "this_machine", lambda: Machine(2, free_mb[0]))
    for name, parts, checkpoint in (("first", first, "1"), ("second", second, "1" if first else "2")):
        memory = json.dumps({"engines": 100, "KV": 5000, "adapters": 0, **parts})
        parameters = {"device_memory": memory, "checkpoint_sha256": checkpoint, "max_concurrency": "4"}
        add(tmp_path, name, GENERATES | parameters)
    taken, go_on = threading.Event(), threading.Event()

    def load(name: str) -> None:
        if name == "first":
            # A front with workers has taken nothing when it is loaded: they are loaded later.
            free_mb[0] -= 4000 if fits else 0
            taken.set()
            assert is_loaded or go_on.wait(60)
        go_on.set()

    def say(text: str) -> None:
        assert text.startswith("skipping second, which does not fit: ")
        go_on.set()

    with Loader(load, tmp_path, say) as loader:
        loader.start("first")
        assert taken.wait(60)
        loader.start("second")
    assert loader.loaded == ({"first", "second"} if fits else {"first"})


def test_without_a_server_nothing_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "--load", "--build", str(tmp_path)]) == 2
    assert "--load: no server runs on" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
