"""`shapeshift reload`, against a server that notes what it is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from shapeshift.cli.main import main
from shapeshift.triton import control


class Server:
    """The models `encode` (generation 4) and `other` of another repository."""

    loads: list[tuple[str, Any]]

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def index(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in ("encode", "other")]

    def is_ready(self, name: str) -> bool:
        return True

    def parameters(self, name: str) -> dict[str, str]:
        return {"generation": "4"}

    def load(self, name: str, config: dict[str, Any] | None) -> None:
        self.loads.append((name, config))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Server]:
    monkeypatch.setattr(control, "ModelControl", Server)
    Server.loads = []
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "build" / "repository" / "encode"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        'name: "encode"\nparameters { key: "queue_rows" value { string_value: "9" } }\n'
    )
    return Server


def test_a_model_is_loaded_as_its_files_say_now(server: type[Server], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reload", "encode", "other"]) == 0
    (encode, config), other = server.loads
    assert encode == "encode" and other == ("other", None)
    assert {name: value["string_value"] for name, value in config["parameters"].items()} == {
        "queue_rows": "9",
        "generation": "5",
    }
    assert capsys.readouterr().out == "encode: loaded again\nother: loaded again\n"


def test_an_unknown_model_is_refused_before_anything_is_loaded(
    server: type[Server], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reload", "encode", "othr"]) == 2
    assert "the server has no model othr; did you mean other? there are: encode, other" in capsys.readouterr().err
    assert server.loads == []
