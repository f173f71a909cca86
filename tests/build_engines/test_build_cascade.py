"""`make engines` for cascades: candidates are checked against the engines of their levels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shapeshift.build_engines.description import published_ask
from shapeshift.cascade import candidates, local_candidates
from shapeshift.cascade.candidates import Candidate, CandidateTable, Gap, LevelModel
from shapeshift.cli.main import main
from shapeshift.engines import manifest
from shapeshift.engines.manifest import EngineEntry, Latency, Manifest
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
    alone = Candidate("small", ("small",), (), 0.5, 1.0, 1.0, 1.0, (1.0,), (1.0,), 0.5, 0.0, 0.45)
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
    candidates.put(folder, table(manifest.load(engines / "small").checkpoint_sha256), "small", pinned=False)
    status, said, _ = make()
    assert status == 0 and "a_cascade: task coin, candidate small" in said
    parameters = model_config.parameters(model_config.read(tmp_path / "build/repository/a_cascade/config.pbtxt"))
    target = tmp_path / "build/repository/a_cascade"
    assert (target / parameters["candidates_dir"]).resolve() == folder
    assert (target / parameters["engines_dir"]).resolve() == engines.resolve()
    # Its own process holds the engines of the first level; a path may be relative.
    asks = [
        published_ask(name, Path("build/repository") / name, model_config.read(target.parent / name / "config.pbtxt"))
        for name in ("a_cascade", "small")
    ]
    assert asks[0].memory_mb == asks[1].memory_mb > 0


def test_a_table_of_other_checkpoints_is_not_published(
    tmp_path: Path, make: Callable[..., tuple[int, str, str]]
) -> None:
    folder = tmp_path / "checkpoints" / "coin"
    candidates.put(folder, table("0" * 64), "small", pinned=False)
    status, _, said = make()
    assert status == 1 and "comes from another checkpoint" in said and "not published: a_cascade" in said
    data = json.loads((folder / "registry.json").read_text())
    (folder / "registry.json").write_text(json.dumps({**data, "entries": {"other": data["entries"]["coin"]}}))
    status, _, said = make("a_cascade")
    assert status == 1 and "no candidates for 'coin'" in said


def test_a_table_from_another_cpu_is_chosen_anew(tmp_path: Path, make: Callable[..., tuple[int, str, str]]) -> None:
    make()
    engines, folder = tmp_path / "build" / "engines", tmp_path / "checkpoints" / "coin"
    profiled = table(manifest.load(engines / "small").checkpoint_sha256)
    candidates.put(folder, replace(profiled, origin={"hardware": "another CPU"}), "small", pinned=False)
    status, said, _ = make()
    target = tmp_path / "build" / "repository" / "a_cascade"
    stated = model_config.parameters(model_config.read(target / "config.pbtxt"))
    here = (target / stated["candidates_dir"]).resolve()
    assert status == 0 and f"chosen anew in {here}" in said and here != folder
    found = candidates.serving(here, "coin")
    assert found.table.origin["hardware"] == manifest.load(engines / "small").hardware
    assert found.table.models[0].latency_ms != profiled.models[0].latency_ms
    # What a command chose there stays until the table or the engines change.
    candidates.put(here, found.table, "small", pinned=True)
    make()
    assert candidates.serving(here, "coin").pinned


def chain(name: str, accuracy: float, latency_ms: float, shares: tuple[float, float]) -> Candidate:
    return Candidate(
        name,
        ("small", "large"),
        (Gap(0.8, 10.0, "sigmoid", 0.0, 0.5),),
        accuracy,
        latency_ms,
        latency_ms,
        latency_ms,
        (1.0, 10.0),
        shares,
        0.5,
        0.0,
        accuracy - 0.05,
    )


def test_the_choice_follows_this_machines_latencies() -> None:
    """The chain is fastest at its accuracy where it was measured. Here the small model is as fast as the large one."""
    single = table("").candidates[0]
    large = replace(single, name="large", levels=("large",), accuracy=0.6, model_latencies=(10.0,), latency_ms=10.0)
    large = replace(large, accuracy_bound=0.55)
    mixed = chain("mixed", 0.6, 1.0 + 0.3 * 10, (0.7, 0.3))
    models = (table("").models[0], replace(table("").models[0], name="large"))
    profiled = replace(table(""), models=models, candidates=(single, large, mixed))
    found = candidates.ServingCandidate(profiled, mixed, pinned=False)
    slow_small = {"small": timed("here", 8.0), "large": timed("here", 8.0)}
    made = local_candidates.on_this_machine(found, slow_small, "source")
    assert made.candidate.name == "large" and made.candidate.latency_ms == pytest.approx(8.0)
    assert made.table.candidate("mixed").latency_ms == pytest.approx(8.0 + 0.3 * 8.0)
    assert [one.accuracy for one in made.table.candidates] == [0.5, 0.6, 0.6]
    alike = local_candidates.on_this_machine(
        found, {"small": timed("here", 0.5), "large": timed("here", 5.0)}, "source"
    )
    assert alike.candidate.name == "mixed" and alike.candidate.latency_ms == pytest.approx(2.0)
    pinned = local_candidates.on_this_machine(replace(found, pinned=True), slow_small, "source")
    assert pinned.candidate.name == "mixed"
    # The bound is compared: the large model, as accurate as before, is no longer as certain.
    unsure = replace(profiled, candidates=(single, replace(large, accuracy_bound=0.54), mixed))
    assert (
        local_candidates.on_this_machine(replace(found, table=unsure), slow_small, "source").candidate.name == "mixed"
    )
    # Without bounds, as in tables of 0.1, the candidate stays.
    old = replace(profiled, candidates=tuple(replace(one, accuracy_bound=None) for one in profiled.candidates))
    kept = local_candidates.on_this_machine(
        candidates.ServingCandidate(old, old.candidate("mixed"), pinned=False), slow_small, "source"
    )
    assert kept.candidate.name == "mixed" and kept.candidate.latency_ms == pytest.approx(8.0 + 0.3 * 8.0)


def timed(hardware: str, ms: float) -> Manifest:
    """A manifest with one engine that takes `ms` for every text."""
    entry = EngineEntry("model", 32, 1, 0.0, 1.0, (Latency(32, 1, ms, ms, ms),))
    texts: dict[str, Any] = dict.fromkeys(
        ("model", "checkpoint_sha256", "build_key", "provider", "provider_version"), ""
    )
    others: dict[str, Any] = dict.fromkeys(("precision", "reference", "tolerance"), "")
    return Manifest(
        **texts,
        **others,
        vocabulary=1,
        max_tokens=32,
        packs_rows=False,
        position_offset=0,
        hardware=hardware,
        outputs=(),
        files={},
        engines=(entry,),
    )
