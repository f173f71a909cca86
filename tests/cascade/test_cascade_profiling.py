"""The search for candidates on a sample with known answers, their table and registry, and the command."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift import files
from shapeshift.cascade import candidates
from shapeshift.cascade.policy import calibration, routing
from shapeshift.cascade.policy.routing import softmax
from shapeshift.cascade.policy.selection import is_practical
from shapeshift.cascade.profiling import samples
from shapeshift.cascade.profiling import search as profiling
from shapeshift.cascade.profiling.model_profile import ModelProfile, Task, profile_model, random_half
from shapeshift.cascade.profiling.observation import ModelRunner, Observation
from shapeshift.cascade.profiling.outcomes import Exit, expected_outcome, weighted_percentile
from shapeshift.cascade.profiling.search import CandidateSearch, Plan
from shapeshift.cli.main import main
from shapeshift.errors import InvalidInputError, NotFoundError
from tests.cascade.conftest import candidate, gap
from tests.test_registry import let_a_minute_pass

if TYPE_CHECKING:
    from tests.cascade.conftest import Workspace

CLASSES, COUNT = 4, 300


def observed(rng: np.random.Generator, truth: np.ndarray, sharpness: float, ms: float) -> Observation:
    """A model that sees the truth through noise; each text has three words, of which the middle one says nothing."""
    logits = rng.normal(size=(len(truth), CLASSES))
    logits[np.arange(len(truth)), truth] += sharpness
    offsets = np.array([[-1, -1], [0, 2], [3, 5], [6, 8], [-1, -1]], np.int32)
    importance = np.array([5.0, 1.0, 0.2, 1.0, 5.0])
    times = np.full(len(truth), ms)
    return Observation(logits * 2, times, [importance] * len(truth), [offsets] * len(truth), None)


@pytest.fixture
def task() -> Task:
    rng = np.random.default_rng(0)
    return Task([[b"aa bb cc"]] * COUNT, rng.integers(0, CLASSES, COUNT), random_half(COUNT))


@pytest.fixture
def models(task: Task) -> list[ModelProfile]:
    rng = np.random.default_rng(1)
    made = [("small", 1.5, 1.0), ("middle", 2.2, 3.0), ("large", 3.0, 8.0)]
    return [profile_model(name, observed(rng, task.truth, sharp, ms), task) for name, sharp, ms in made]


def search(
    task: Task, models: list[ModelProfile], loss: float = 0.0, **choices: Any
) -> tuple[CandidateSearch, list[Any]]:
    """A search in which a model's answers to pruned texts are its own, a share `loss` of them spoilt and 20% faster."""
    asked: list[Any] = []
    by_name = {model.name: model for model in models}

    def run(name: str, texts: Sequence[Sequence[bytes]], what: str) -> Observation:
        assert name in what
        asked.append((name, [list(text) for text in texts]))
        seen = by_name[name].observed
        logits = seen.logits.copy()
        spoilt = int(loss * len(logits))
        logits[:spoilt] = -logits[:spoilt]
        return dataclasses.replace(seen, logits=logits, engine_ms=seen.engine_ms * 0.8)

    return CandidateSearch(task, models, run, **choices), asked


def test_calibration_is_measured_on_what_it_was_not_fitted_on(models: list[ModelProfile]) -> None:
    for model, sharpness in zip(models, (1.5, 2.2, 3.0), strict=True):
        # Of noise with deviation 1 and a signal s, s times what is seen are the right logits; `observed` gives 2 times.
        assert model.temperature == pytest.approx(2 / sharpness, rel=0.4)
        assert model.ece < 0.15
    assert models[0].accuracy < models[1].accuracy < models[2].accuracy


def test_one_half_chooses_and_the_other_measures(task: Task) -> None:
    """On the scoring half the logits are 5 times as sharp, and wrong more often: nothing that is chosen may show it."""
    seen = observed(np.random.default_rng(3), task.truth, 2.0, 1.0)
    logits = np.where(task.scoring[:, None], -seen.logits * 5, seen.logits)
    made = profile_model("model", dataclasses.replace(seen, logits=logits), task)
    chosen, scored = task.choosing, task.scoring
    assert made.temperature == calibration.fit_temperature(seen.logits[chosen], task.truth[chosen])
    assert made.accuracy == task.right(seen.logits)[chosen].mean() > 0.7
    sure = routing.confidence(logits[scored], made.temperature)
    assert made.reliability == calibration.reliability(sure, task.right(logits)[scored])
    found, _ = search(task, [made])
    (alone,) = found.candidates()
    assert alone.accuracy == task.right(logits)[scored].mean() < 0.2
    assert alone.accuracy_bound is not None and alone.accuracy_bound < alone.accuracy


def test_nothing_that_is_chosen_depends_on_the_scoring_texts(task: Task, models: list[ModelProfile]) -> None:
    """With other truths for the scoring texts, the same candidates are found, with other accuracies."""
    others = np.where(task.scoring, (task.truth + 1) % CLASSES, task.truth)
    changed = dataclasses.replace(task, truth=others)
    found, _ = search(task, models, algorithms=list(routing.ALGORITHMS))
    again, _ = search(changed, [profile_model(one.name, one.observed, changed) for one in models])
    again.algorithms = found.algorithms
    before, after = found.candidates(), again.candidates()
    assert [(one.name, one.gaps, one.shares) for one in before] == [(one.name, one.gaps, one.shares) for one in after]
    assert all(two.accuracy < one.accuracy - 0.3 for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("algorithm", list(routing.ALGORITHMS))
def test_a_candidate_is_what_drawing_would_give(task: Task, models: list[ModelProfile], algorithm: str) -> None:
    small, large = models[0], models[2]
    found, _ = search(task, models, algorithms=[algorithm])
    one = found.score(Plan((small, large), routing.RoutingRule(0.8, 10.0, algorithm), 0.0), 1)
    assert one.levels == ("small", "large") and one.gaps[0].c == 0.8
    # By brute force, many draws a text.
    rng = np.random.default_rng(7)
    right = times = early = 0.0
    rounds = 50
    small_p, large_p = softmax(small.observed.logits), softmax(large.observed.logits)
    scored = np.flatnonzero(task.scoring)
    for text in scored:
        con = softmax(small.observed.logits[text], small.temperature).max()
        p = routing.p_large(float(con), routing.RoutingRule(0.8, 10.0, algorithm))
        mixed = one.gaps[0].w * large_p[text] + (1 - one.gaps[0].w) * small_p[text]
        onward = (rng.random(rounds) < p).mean()
        right += onward * (mixed.argmax() == task.truth[text]) + (1 - onward) * (
            small_p[text].argmax() == task.truth[text]
        )
        times += 1 + onward * 8.1
        early += 1 - onward
    assert one.accuracy == pytest.approx(right / len(scored), abs=0.01)
    assert one.latency_ms == pytest.approx(times / len(scored), rel=0.02)
    assert one.shares[0] == pytest.approx(early / len(scored), abs=0.02) and sum(one.shares) == pytest.approx(1)
    assert one.latency_ms == pytest.approx(1 + (one.shares[1]) * 8.1)


def test_the_search_goes_over_models_cuts_and_scales(task: Task, models: list[ModelProfile]) -> None:
    found, asked = search(task, models)
    candidates = found.candidates()
    chains = {one.levels for one in candidates}
    assert {("small",), ("middle",), ("large",), ("small", "large")} <= chains
    assert ("large", "small") not in chains
    assert len({one.name for one in candidates}) == len(candidates)
    for one in candidates:
        assert is_practical(one)
        assert len(one.gaps) == len(one.levels) - 1
    # The middle word of every text goes, or at large scales all would: then none does, and nothing is run. Each scale
    # runs once a pair.
    assert {name for name, _ in asked} == {"middle", "large"}
    assert {text for _, texts in asked for (text,) in texts} == {b"aa cc"}
    assert len(asked) <= 3 * 11
    # Where pruning costs nothing and saves a fifth, the fastest of a chain prune.
    both = [one for one in candidates if one.levels == ("small", "large")]
    assert min(both, key=lambda one: one.latency_ms).gaps[0].alpha > 0
    assert all(one.pruned == pytest.approx(1 / 3) for one in both if one.gaps[0].alpha)
    # The table keeps those that no other of their chain dominates on the texts that choose.
    by_name = {model.name: model for model in models}
    tried = [
        found.try_out(
            Plan(
                tuple(by_name[name] for name in one.levels),
                one.gaps[0].rule,
                one.gaps[0].alpha,
            )
        )
        for one in both
    ]
    ordered = sorted(tried, key=lambda one: one.latency_ms)
    assert all(a.accuracy < b.accuracy for a, b in zip(ordered, ordered[1:], strict=False))


def test_pruning_stops_where_it_costs_too_much(task: Task, models: list[ModelProfile]) -> None:
    found, asked = search(task, models, loss=0.2)
    candidates = found.candidates(max_levels=2)
    assert len(asked) == 3 and all(gap.alpha == 0 for one in candidates for gap in one.gaps)


def test_the_cut_stops_where_the_mean_of_the_models_is_reached(task: Task, models: list[ModelProfile]) -> None:
    small, large = models[0], models[2]
    found, _ = search(task, [small, large])
    least = (small.accuracy + large.accuracy) / 2
    tried = [
        found.try_out(Plan((small, large), one.gaps[0].rule, one.gaps[0].alpha))
        for one in found.candidates()
        if one.gaps
    ]
    assert tried and all(one.accuracy >= least for one in tried)


def test_both_algorithms_fill_one_table(task: Task, models: list[ModelProfile]) -> None:
    chain = [models[0], models[2]]
    both, asked = search(task, chain, loss=0.2, algorithms=list(routing.ALGORITHMS))
    found = both.candidates()
    assert len({one.name for one in found}) == len(found) and len(asked) == 1
    alone, _ = search(task, chain, loss=0.2)
    assert [one.name for one in alone.candidates()] == [one.name for one in found if not one.name.endswith(" cut")]
    assert {gap.algorithm for one in found for gap in one.gaps} == set(routing.ALGORITHMS)


def test_regressions_are_sure_by_agreement() -> None:
    rng = np.random.default_rng(2)
    embedding = rng.normal(size=(COUNT, 3))
    truth = embedding[:, 0]
    # The small model is right where the second number of the embedding is large.
    small = np.where(embedding[:, 1] > 0, truth, truth + 2)
    seen = Observation(small[:, None], np.ones(COUNT), [], [np.zeros((1, 2))] * COUNT, embedding)
    large = Observation(truth[:, None] + 0.01, np.full(COUNT, 8.0), [], [np.zeros((1, 2))] * COUNT, None)
    task = Task([[b"x"]] * COUNT, truth, random_half(COUNT), tolerance=0.9)
    models = [profile_model("small", seen, task), profile_model("large", large, task)]
    assert models[0].accuracy == pytest.approx(0.5, abs=0.1) and models[1].accuracy == 1
    made = CandidateSearch(task, models, lambda name, texts, what: large, algorithms=["cut"]).candidates()
    early = [one for one in made if len(one.levels) == 2 and one.shares[0] > 0.25]
    best = max(early, key=lambda one: one.accuracy)
    assert all(gap.agreement for one in made for gap in one.gaps)
    # Half of the small model's answers are right, and it is known which.
    assert best.accuracy > 0.9 and len(best.gaps[0].agreement) == 4
    # What tells no embedding, as the large model, can only come last.
    blind = dataclasses.replace(models[0], name="blind", observed=dataclasses.replace(seen, embedding=None))
    found = CandidateSearch(task, [blind, *models], lambda name, texts, what: large).candidates()
    assert {one.levels for one in found if len(one.levels) > 1} == {("small", "large")}


def test_expectations_and_percentiles() -> None:
    exits = [
        Exit(np.array([1.0, 0.25]), np.array([1.0, 0.0]), np.array([1.0, 2.0])),
        Exit(np.array([0.0, 0.75]), np.array([0.0, 1.0]), np.array([9.0, 10.0])),
    ]
    found = expected_outcome(exits)
    assert found.accuracy == pytest.approx(1.75 / 2) and found.mean_ms == pytest.approx((1 + 0.5 + 7.5) / 2)
    assert found.shares == (0.625, 0.375)
    assert (found.p75_ms, found.p99_ms) == (10.0, 10.0)
    rng = np.random.default_rng(0)
    values, weights = rng.random(50), rng.integers(1, 5, 50)
    for share in (0.25, 0.5, 0.75, 0.99):
        assert weighted_percentile(values, weights.astype(float), share) == np.quantile(
            np.repeat(values, weights), share, method="inverted_cdf"
        )


# Table and registry.


def test_a_table_survives_its_file(workspace: Workspace, tmp_path: Path) -> None:
    made = workspace.table(
        candidate("both", ("small", "large"), [gap(agreement=(1.0, 2.0))]), candidate("one", ["small"], [])
    )
    file = tmp_path / "table.json"
    file.write_text(made.as_json())
    assert candidates.read(file) == made


def test_a_table_without_bounds_is_read(workspace: Workspace, tmp_path: Path) -> None:
    data = json.loads(workspace.table(candidate("one", ["small"], [])).as_json())
    del data["candidates"][0]["accuracy_bound"]
    found = candidates.parse(data).candidates[0]
    assert found.accuracy_bound is None and found.assured_accuracy == 0 and found.accuracy == 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"kind": "other"}, "kind"),
        ({"extra": 1}, "extra"),
        ({"made": 1}, r"table\.made: got 1"),
        ({"origin": {}}, r"table\.origin: .*unknown key; known: task, .*, made, models"),
        ({"labels": []}, "labels"),
        ({"candidates": [{"name": "x"}]}, "candidates"),
        ({"models": []}, "one of models"),
        ({"kind": "regression"}, "agreement"),
    ],
)
def test_broken_tables_are_refused(workspace: Workspace, change: dict[str, Any], message: str) -> None:
    data = json.loads(workspace.table(candidate("both", ("small", "large"), [gap()])).as_json())
    with pytest.raises(InvalidInputError, match=message):
        candidates.parse({**data, **change})


def test_tables_that_are_registered_at_once_all_serve(workspace: Workspace) -> None:
    made = workspace.table(candidate("one", ["small"], []))
    tasks = [f"task{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda task: candidates.put(workspace.folder, dataclasses.replace(made, task=task), "one", False), tasks
            )
        )
    assert sorted(candidates.entries(workspace.folder)) == sorted(tasks)


@pytest.mark.parametrize("field", ["gaps", "shares", "model_latencies", "name"])
def test_candidates_that_do_not_fit_themselves(workspace: Workspace, field: str) -> None:
    data = json.loads(workspace.table(candidate("both", ("small", "large"), [gap()])).as_json())
    if field == "name":
        data["candidates"] *= 2
    else:
        data["candidates"][0][field] = []
    with pytest.raises(InvalidInputError):
        candidates.parse(data)


def test_the_registry_names_what_serves(workspace: Workspace) -> None:
    made = workspace.table(candidate("both", ("small", "large"), [gap()]), candidate("one", ["small"], []))
    with pytest.raises(NotFoundError, match="known: none"):
        candidates.serving(workspace.folder, "task")
    candidates.put(workspace.folder, made, "one", pinned=True)
    other = dataclasses.replace(made, task="other")
    candidates.put(workspace.folder, other, "both", pinned=False)
    assert candidates.serving(workspace.folder, "task").candidate.name == "one"
    assert candidates.serving(workspace.folder, "other").candidate.name == "both"
    assert candidates.entries(workspace.folder)["task"].pinned
    tables = [one.table for one in candidates.entries(workspace.folder).values()]
    assert sorted(path.name for path in workspace.folder.glob("*.json")) == sorted(["registry.json", *tables])
    with pytest.raises(NotFoundError, match="known: both, one"):
        candidates.put(workspace.folder, made, "none", pinned=False)
    with pytest.raises(InvalidInputError, match="plain name"):
        candidates.put(workspace.folder, dataclasses.replace(made, task="../x"), "one", pinned=False)
    data = json.loads((workspace.folder / "registry.json").read_text())
    data["entries"]["task"]["table"] = "../task.json"
    (workspace.folder / "registry.json").write_text(json.dumps(data))
    with pytest.raises(InvalidInputError, match="plain file name"):
        candidates.serving(workspace.folder, "task")


def test_a_reader_finds_the_table_that_the_registry_names(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = workspace.folder, files.replace_text
    made = workspace.table(candidate("both", ("small", "large"), [gap()]), candidate("one", ["small"], []))
    workspace.put(made)
    before, seen = candidates.serving(folder, "task"), []

    def replace_text(path: Path, text: str, durable: bool = True) -> None:
        real(path, text, durable)
        if path.name != "registry.json":
            seen.append(candidates.serving(folder, "task"))

    monkeypatch.setattr(files, "replace_text", replace_text)
    first = candidates.entries(folder)["task"].table
    second = candidates.put(folder, dataclasses.replace(made, origin={"again": 1}), "one", pinned=False)
    assert seen == [before] and (folder / first).is_file(), "servers may not have read the registry since"
    let_a_minute_pass(folder, candidates.KIND)
    third = candidates.put(folder, dataclasses.replace(made, origin={"again": 2}), "one", pinned=False)
    assert sorted(folder.glob("*.json")) == sorted([folder / "registry.json", second, third]), "the first is gone"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("written", [0, 1])
def test_a_full_or_read_only_registry_serves_what_it_had(
    workspace: Workspace,
    number: int,
    written: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """written: 0 where the table does not fit, 1 where it does and registry.json does not."""
    folder = workspace.folder
    made = workspace.table(candidate("both", ("small", "large"), [gap()]), candidate("one", ["small"], []))
    workspace.put(made)
    before, left, real = candidates.serving(folder, "task"), written, files.replace_text
    shown = sorted(folder.iterdir())

    def replace_text(path: Path, text: str, durable: bool = True) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(number, os.strerror(number), str(path))
        real(path, text, durable)

    monkeypatch.setattr(files, "replace_text", replace_text)
    for changed in (dataclasses.replace(made, origin={"again": 1}), dataclasses.replace(made, task="other")):
        left = written
        with pytest.raises(OSError, match=os.strerror(number)):
            candidates.put(folder, changed, "one", pinned=True)
        assert candidates.serving(folder, "task") == before and sorted(folder.iterdir()) == shown
    left = written
    assert main(["cascade", "select", "--dir", str(folder), "--task", "task", "--candidate", "one"]) == 2
    assert os.strerror(number) in capsys.readouterr().err
    assert candidates.serving(folder, "task") == before and sorted(folder.iterdir()) == shown


# Samples and the command.


def test_samples(tmp_path: Path) -> None:
    lines, tabs = tmp_path / "a.jsonl", tmp_path / "b.tsv"
    lines.write_text('{"text": "a b", "label": "yes"}\n\n{"text": "ü", "label": 0}\n')
    tabs.write_text("a\tb\t1.5\nc\td\t2\n")
    first, second = samples.read(lines), samples.read(tabs)
    assert first.texts == [[b"a b"], ["ü".encode()]] and not first.pairs
    assert first.classes(("no", "yes")).tolist() == [1, 0]
    assert second.texts == [[b"a", b"b"], [b"c", b"d"]] and second.pairs and second.values().tolist() == [1.5, 2]
    with pytest.raises(InvalidInputError, match="row 0"):
        first.classes(("no", "maybe"))
    with pytest.raises(InvalidInputError, match="a number"):
        first.values()


@pytest.mark.parametrize("text", ["", "one\n", "a\tb\nc\td\te\n", "\tb\n"])
def test_samples_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.tsv").write_text(text)
    with pytest.raises(InvalidInputError):
        samples.read(tmp_path / "x.tsv")
    (tmp_path / "x.jsonl").write_text(text or '{"text": "", "label": 1}')
    with pytest.raises(InvalidInputError):
        samples.read(tmp_path / "x.jsonl")
    with pytest.raises(InvalidInputError):
        samples.read(tmp_path / "none.tsv")


@pytest.fixture
def two_models(tmp_path: Path, add_front: Callable[..., Path], build_fronts: Callable[[Path, Path], Path]) -> Path:
    """The engines of `quick` and `slow`, which tell two classes apart by chance."""
    outputs = 'output [ { name: "LOGITS" data_type: TYPE_FP32 dims: [ 2 ] }'
    for name, latency in (("quick", (0.5, 0.5)), ("slow", (4.0, 4.0))):
        folder = add_front(tmp_path / "model_repository", name, latency_ms=latency, bins="16")
        text = (folder / "config.pbtxt").read_text()
        importance = ', { name: "IMPORTANCE" data_type: TYPE_FP32 dims: [ -1 ] }' if name == "quick" else ""
        text = text.replace(text[text.index("output [") : text.index("instance_group")], f"{outputs}{importance} ]\n")
        (folder / "config.pbtxt").write_text(text)
    build_fronts(tmp_path / "model_repository", tmp_path / "build")
    return tmp_path / "build" / "engines"


ENGINE_MS = {"quick": 0.5, "slow": 4.0}


def test_register_select_and_list(
    two_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ModelRunner._run
    # On a busy machine any model may seem to be the slowest, and any candidate impractical.
    monkeypatch.setattr(ModelRunner, "_run", lambda runner, ids: (run(runner, ids)[0], ENGINE_MS[runner.name]))
    lines = [{"text": f"text number {number} of many", "label": number % 2} for number in range(8)]
    (tmp_path / "sample.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder = str(tmp_path / "candidates")
    common = ["--dir", folder, "--task", "coin"]
    register = [
        "cascade",
        "register",
        *common,
        "--sample",
        str(tmp_path / "sample.jsonl"),
        "--engines",
        str(two_models),
    ]
    assert main([*register, "--models", "quick,slow"]) == 0
    made = candidates.serving(tmp_path / "candidates", "coin")
    assert made.candidate.latency_ms == min(one.latency_ms for one in made.table.candidates)
    assert {model.name for model in made.table.models} == {"quick", "slow"}
    assert made.table.origin["texts"] == 8 and "IMPORTANCE" in made.table.model("quick").outputs
    capsys.readouterr()
    assert all(one.accuracy_bound is not None for one in made.table.candidates)
    # Nothing is always right within no time: the best is named.
    assert main([*register, "--models", "quick,slow", "--min-accuracy", "1", "--max-latency-ms", "0.01"]) == 1
    assert "no accuracy bound reaches 100% within 0.01 ms; the best is " in capsys.readouterr().out
    known = candidates.serving(tmp_path / "candidates", "coin").table
    assert {one.name: one.latency_ms for one in known.models} == ENGINE_MS
    longest = max(known.candidates, key=lambda one: one.latency_ms)
    assert main(["cascade", "select", *common, "--candidate", longest.name]) == 0
    assert candidates.serving(tmp_path / "candidates", "coin").candidate.name == longest.name
    assert candidates.entries(tmp_path / "candidates")["coin"].pinned
    below = longest.latency_ms * 0.999
    assert main(["cascade", "select", *common, "--max-latency-ms", str(below)]) == 0
    served = candidates.serving(tmp_path / "candidates", "coin").candidate
    assert served.latency_ms <= below
    capsys.readouterr()
    assert main(["cascade", "list", "--dir", folder]) == 0
    listed = capsys.readouterr().out
    assert "task coin" in listed and f"* {served.name}" in listed and "accuracy at least" in listed


def test_register_refuses(two_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sample.tsv").write_text("a text\t7\nanother\t1\n")
    common = ["cascade", "register", "--dir", str(tmp_path / "c"), "--task", "t", "--engines", str(two_models)]
    common += ["--sample", str(tmp_path / "sample.tsv"), "--models"]
    for names, message in (("quick,slow", "row 0: label"), ("nowhere", "manifest"), ("quick,quick", "each name once")):
        assert main([*common, names]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "sample.tsv").write_text("a text\t1\n")
    assert main([*common, "quick"]) == 2
    assert "at least 2" in capsys.readouterr().err
    (tmp_path / "sample.tsv").write_text("a text\t1\nanother\t1\n")
    assert main([*common, "quick", "--tolerance", "0.5"]) == 2
    assert "tolerance" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    assert main(["cascade", "list", "--dir", str(tmp_path / "c")]) == 2
    assert profiling.MAX_LEVELS == 3
