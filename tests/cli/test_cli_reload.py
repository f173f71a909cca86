"""`shapeshift reload`, against a server that notes what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shapeshift.cli.main import main
from tests.model_control import FakeControl


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeControl]:
    """It has the models `encode` (generation 4), and `other` of another repository."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "build" / "repository" / "encode"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        'name: "encode"\nparameters { key: "queue_rows" value { string_value: "9" } }\n'
    )
    control = FakeControl({"encode": {"parameters": {"generation": {"string_value": "4"}}}, "other": {}})
    yield control
    control.close()


@pytest.mark.parametrize("dead", [set(), {"encode"}])
def test_a_model_is_loaded_as_its_files_say_now(
    server: FakeControl, dead: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.dead = dead
    assert main(["reload", "encode", "other", "--server", server.address]) == 0
    (encode, config), other = server.loads
    assert encode == "encode" and other == ("other", None) and config is not None
    assert {name: value["string_value"] for name, value in config["parameters"].items()} == {
        "queue_rows": "9",
        "generation": "5",
    }
    assert capsys.readouterr().out == "encode: loaded again\nother: loaded again\n"


def test_an_unknown_model_is_refused_before_anything_is_loaded(
    server: FakeControl, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reload", "encode", "othr", "--server", server.address]) == 2
    assert "the server has no model othr; did you mean other? there are: encode, other" in capsys.readouterr().err
    assert server.loads == []
