"""`make engines` for cascades: candidates are checked against the engines of their levels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.cascade.candidates import registry
from shapeshift.cascade.candidates.table import Candidate, CandidateTable, LevelModel
from shapeshift.cli.main import main
from shapeshift.engines import manifest
from shapeshift.triton import model_config

_OUTPUT = 'output [ { name: "LOGITS" data_type: TYPE_FP32 dims: [ 2 ] } ]\n'
_FRONT = """
backend: "cascade"
max_batch_size: 64
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters [
  { key: "candidates_dir" value { string_value: "coin" } },
  { key: "task" value { string_value: "coin" } }
]
"""


def table(checkpoint_sha256: str) -> CandidateTable:
    """A table whose one candidate is the model `small`."""
    model = LevelModel("small", checkpoint_sha256, 0.5, 1.0, 1.0, 0.0, ("LOGITS",))
    alone = Candidate("small", ("small",), (), 0.5, 1.0, 1.0, 1.0, (1.0,), (1.0,), 0.5, 0.0)
    return CandidateTable("coin", "classification", ("LABEL_0", "LABEL_1"), False, 0.0, {}, (model,), (alone,))


@pytest.fixture
def make(
    tmp_path: Path, add_front: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A function that runs the command in a project with a level `small` and a cascade `a_cascade`."""
    folder = add_front(tmp_path / "model_repository", "small", bins="16")
    text = (folder / "config.pbtxt").read_text()
    text = text.replace(text[text.index("output [") : text.index("instance_group")], _OUTPUT)
    (folder / "config.pbtxt").write_text(text)
    front = tmp_path / "model_repository" / "a_cascade"
    front.mkdir()
    (front / "config.pbtxt").write_text(_FRONT)
    monkeypatch.chdir(tmp_path)

    def run(*models: str) -> tuple[int, str, str]:
        status = main(["engines", *models])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_cascade_is_published_after_its_levels(tmp_path: Path, make: Callable[..., tuple[int, str, str]]) -> None:
    status, _, said = make()
    assert status == 1 and "candidates_dir: no folder" in said
    # The level was built all the same.
    engines = tmp_path / "build" / "engines"
    folder = tmp_path / "checkpoints" / "coin"
    registry.put(folder, table(manifest.load(engines / "small").checkpoint_sha256), "small", pinned=False)
    status, said, _ = make()
    assert status == 0 and "a_cascade: task coin, candidate small" in said
    parameters = model_config.parameters(model_config.read(tmp_path / "build/repository/a_cascade/config.pbtxt"))
    target = tmp_path / "build/repository/a_cascade"
    assert (target / parameters["candidates_dir"]).resolve() == folder
    assert (target / parameters["engines_dir"]).resolve() == engines.resolve()


def test_a_table_of_other_checkpoints_is_not_published(
    tmp_path: Path, make: Callable[..., tuple[int, str, str]]
) -> None:
    folder = tmp_path / "checkpoints" / "coin"
    registry.put(folder, table("0" * 64), "small", pinned=False)
    status, _, said = make()
    assert status == 1 and "comes from another checkpoint" in said and "not published: a_cascade" in said
    data = json.loads((folder / "registry.json").read_text())
    (folder / "registry.json").write_text(json.dumps({**data, "entries": {"other": data["entries"]["coin"]}}))
    status, _, said = make("a_cascade")
    assert status == 1 and "no candidates for 'coin'" in said
