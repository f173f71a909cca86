"""The cascade from Triton's request to its response."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.cascade import candidates
from shapeshift.cascade.front import CascadeFront
from shapeshift.cascade.policy.routing import softmax
from shapeshift.cli import served_models
from shapeshift.engines import manifest
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError
from shapeshift.triton import model_config
from tests.cascade.conftest import ALL, LABELS, FakeLevel, candidate, gap
from tests.conftest import LIGHT_WIDTH
from tests.fakes import Request, TritonError, text_request, values_of
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.cascade.conftest import Workspace

TWO = ("small", "large")


def ask(front: Any, *texts: str, **parameters: Any) -> dict[str, np.ndarray]:
    request = text_request(*texts, outputs=ALL, parameters=parameters)
    front.execute([request])
    return values_of(request.sender.answer())


def large(workspace: Workspace, logits: tuple[float, ...] = (0.0, 4.0), name: str = "large") -> FakeLevel:
    workspace.pb_utils.models[name] = level = FakeLevel(logits)
    return level


def test_a_sure_text_is_answered_by_the_first_level(workspace: Workspace) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(c=0.0)])))
    found = ask(front, "one two three", "four")
    assert found["LEVEL"].tolist() == [[1], [1]] and not level.asked
    assert found["WORDS_PRUNED"].tolist() == [[0], [0]]
    assert found["PROBABILITIES"].shape == (2, 2)
    np.testing.assert_allclose(found["PROBABILITIES"].sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(found["CONFIDENCE"][:, 0], found["PROBABILITIES"].max(axis=1))
    labels = [LABELS[row].encode() for row in found["PROBABILITIES"].argmax(axis=1)]
    assert found["LABEL"][:, 0].tolist() == labels
    assert (found["ENGINE_MS"] > 0).all() and (found["CONTROL_MS"] > 0).all()
    assert found["LEVEL"].dtype == found["WORDS_PRUNED"].dtype == np.int32


def test_tokens_that_the_first_level_read_are_counted_for_who_asks(workspace: Workspace) -> None:
    large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(c=1.0)])))
    unnamed = text_request("one", outputs=(*ALL, "NUM_TOKENS", "DESCRIPTION"))
    named, later = (
        text_request("one", "one two", outputs=("LEVEL", "NUM_TOKENS"), parameters=given)
        for given in ({}, {"level": 2})
    )
    front.execute([named, unnamed, later])
    assert named.vectors("LEVEL").tolist() == [[2], [2]]
    assert named.vectors("NUM_TOKENS").tolist() == [[3], [4]] and later.vectors("NUM_TOKENS").tolist() == [[0], [0]]
    assert set(values_of(unnamed.sender.answer())) == {*ALL}


def test_a_request_without_inputs_is_told_what_the_model_is(workspace: Workspace) -> None:
    front = workspace.open(workspace.table(candidate("both", TWO, [gap()])))
    asked, bad = Request((*ALL, "DESCRIPTION")), Request(ALL)
    front.execute([asked, bad])
    found = json.loads(asked.vectors("DESCRIPTION").item())
    assert found["kind"] == "text_classification" and found["labels"] == list(LABELS)
    assert found["levels"] == list(TWO) and found["outputs"] == [*ALL, "NUM_TOKENS"] and found["max_tokens"] > 0
    assert found["engines"] == manifest.sha256(workspace.paths.engines / "small")[:12]
    assert bad.refusal()[1] == "inputs: got 'none'; TEXT"


def test_an_unsure_text_gets_the_ensemble_of_both(workspace: Workspace) -> None:
    level = large(workspace, (0.0, 4.0))
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(w=0.6, temperature=2.0)])))
    only_small, both = ask(front, "one two", level=1), ask(front, "one two")
    assert (only_small["LEVEL"].item(), both["LEVEL"].item()) == (1, 2)
    assert level.asked == [[b"one two"]] and level.outputs == [["LOGITS", "ENGINE_MS"]]
    # The first level's confidence is calibrated (T = 1.5); what it puts into the ensemble is softmax at T = 1.
    spread = np.log(only_small["PROBABILITIES"][0]) * 1.5
    s = 0.6 * softmax(np.array([0.0, 4.0])) + 0.4 * softmax(spread)
    np.testing.assert_allclose(both["PROBABILITIES"][0], s, rtol=1e-4)
    np.testing.assert_allclose(both["CONFIDENCE"].item(), softmax(np.log(s), 2.0).max(), rtol=1e-4)
    # The second level reports 7 ms.
    assert both["ENGINE_MS"].item() > 7 and only_small["ENGINE_MS"].item() > 0


def test_only_the_unsure_rows_of_a_request_go_on(workspace: Workspace) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(c=0.6)])))
    texts = [f"text number {number}" for number in range(30)]
    sure = ask(front, *texts, level=1)["CONFIDENCE"][:, 0] > 0.6
    assert 0 < sure.sum() < 30
    found = ask(front, *texts)
    np.testing.assert_array_equal(found["LEVEL"][:, 0], np.where(sure, 1, 2))
    assert [one[0].decode() for one in level.asked] == [text for text, own in zip(texts, sure, strict=True) if not own]
    assert len(level.outputs) == 1


def test_words_are_pruned_by_importance(workspace: Workspace) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(alpha=1.0)])))
    text = "the  quick brown\tfox jumps over the lazy dog"
    found = ask(front, text)
    (left,) = level.asked[0]
    kept = left.decode().split()
    words = text.split()
    assert 0 < found["WORDS_PRUNED"].item() == len(words) - len(kept) < len(words)
    # Emulated importance follows the ids: equal words are pruned together.
    assert kept == [word for word in words if word in kept]
    whole = ask(front, "a")
    assert whole["WORDS_PRUNED"].item() == 0 and level.asked[1] == [b"a"]


def test_three_levels(workspace: Workspace) -> None:
    middle, last = large(workspace, (0.1, 0.0), "middle"), large(workspace, (0.0, 9.0), "large")
    levels = ("small", "middle", "large")
    front = workspace.open(workspace.table(candidate("three", levels, [gap(w=0.5), gap(w=0.5)])))
    found = ask(front, "one")
    assert found["LEVEL"].item() == 3 and len(middle.asked) == len(last.asked) == 1
    first = ask(front, "one", level=1)["PROBABILITIES"][0]
    s = 0.5 * softmax(np.array([0.1, 0.0])) + 0.5 * softmax(np.log(first) * 1.5)
    np.testing.assert_allclose(found["PROBABILITIES"][0], 0.5 * softmax(np.array([0.0, 9.0])) + 0.5 * s, rtol=1e-4)
    middle.logits = [50.0, 0.0]
    alone = ask(front, "one", level=2)
    assert alone["LEVEL"].item() == 2 and alone["LABEL"].item() == b"LABEL_0" and len(last.asked) == 1


def test_the_draws_are_the_same_after_each_load(workspace: Workspace) -> None:
    large(workspace)
    sigmoid = gap(c=0.0).__class__(0.4, 4.0, "sigmoid", 0.0, 0.5)
    table = workspace.table(candidate("both", TWO, [sigmoid]))
    texts = [f"text {number}" for number in range(40)]
    runs = [ask(workspace.open(table), *texts)["LEVEL"][:, 0].tolist() for _ in range(2)]
    assert runs[0] == runs[1] and set(runs[0]) == {1, 2}


def test_a_regression_goes_on_where_the_models_may_disagree(workspace: Workspace) -> None:
    level = large(workspace, (4.0,))
    texts = [f"text {number}" for number in range(20)]

    def serve(constant: float) -> Any:
        agreement = (9.0,) + (0.0,) * (LIGHT_WIDTH - 1) + (constant,)
        both = candidate("both", ("number", "large"), [gap(c=0.5, w=0.75, agreement=agreement)])
        table = workspace.table(both, kind="regression", labels=("LABEL_0",), tolerance=0.5)
        return workspace.open(table)

    front = serve(0.0)
    own = ask(front, *texts, level=1)
    assert own["PROBABILITIES"].shape == (20, 1) and set(own["LEVEL"][:, 0]) == {1}
    sure = own["CONFIDENCE"][:, 0] > 0.5
    assert 0 < sure.sum() < 20
    found = ask(front, *texts)
    np.testing.assert_array_equal(found["LEVEL"][:, 0], np.where(sure, 1, 2))
    number = own["PROBABILITIES"][:, 0]
    np.testing.assert_allclose(found["PROBABILITIES"][:, 0], np.where(sure, number, 3 + number / 4), rtol=1e-5)
    labels = [float(label) for label in found["LABEL"][:, 0]]
    np.testing.assert_allclose(labels, found["PROBABILITIES"][:, 0], rtol=1e-4)
    assert len(level.asked) == (~sure).sum() and level.outputs == [["LOGITS", "ENGINE_MS"]]
    # With an extreme constant all texts exit at the same level.
    assert set(ask(serve(-50.0), *texts)["LEVEL"][:, 0]) == {2}
    assert set(ask(serve(50.0), *texts)["LEVEL"][:, 0]) == {1}


# Faults.


@pytest.mark.parametrize(
    "fault",
    [
        "not there",
        TritonError("Stub process 'large_0_0' is not healthy."),
        TritonError("the queue is full", TritonError.UNAVAILABLE),
        TritonError("row 0: TEXT: got '99 tokens'; at most 64", TritonError.INVALID_ARG),
        RuntimeError("boom"),
        (1.0, 2.0, 3.0),
        (float("nan"), 1.0),
    ],
)
def test_a_level_that_fails_leaves_the_answer_so_far(workspace: Workspace, fault: Any) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(alpha=1.0)])))
    before = ask(front, "one two three four", level=1)
    if fault == "not there":
        del workspace.pb_utils.models["large"]
    elif isinstance(fault, tuple):
        level.logits = list(fault)
    else:
        level.fail = fault
    found = ask(front, "one two three four")
    for name in ("LABEL", "PROBABILITIES", "CONFIDENCE", "LEVEL", "WORDS_PRUNED"):
        np.testing.assert_array_equal(found[name], before[name])
    # A request for that level itself gets the error.
    refused = text_request("one", outputs=ALL, parameters={"level": 2})
    time.sleep(0.01)
    front.execute([refused])
    assert refused.sender.answer().error() is not None
    level.fail, level.logits = None, [0.0, 4.0]
    workspace.pb_utils.models["large"] = level
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 2)


def test_a_level_is_asked_for_the_checkpoint_that_was_profiled(workspace: Workspace) -> None:
    """It is another model: it may be loaded again with other classes at any time."""
    level = large(workspace)
    table = workspace.table(candidate("both", TWO, [gap()]))
    models = [
        dataclasses.replace(one, checkpoint_sha256="0" * 64) if one.name == "large" else one for one in table.models
    ]
    front = workspace.open(dataclasses.replace(table, models=tuple(models)))
    assert ask(front, "one")["LEVEL"].item() == 2
    assert [json.loads(one)["checkpoint"] for one in level.parameters] == ["0" * 64]
    level.fail = TritonError("parameter checkpoint: got another one; retry later", TritonError.UNAVAILABLE)
    assert ask(front, "one")["LEVEL"].item() == 1


def test_texts_that_keep_an_earlier_answer_are_counted(workspace: Workspace) -> None:
    large(workspace).fail = RuntimeError("boom")
    front = workspace.open(workspace.table(candidate("both", TWO, [gap()])))
    assert list(ask(front, "one", "two", "three")["LEVEL"][:, 0]) == [1] * 3
    workspace.fronts.remove(front)
    front.close()
    assert workspace.pb_utils.metric("shapeshift_fallbacks_total") == 3


def test_a_level_that_hangs_times_out_and_is_not_called_again(workspace: Workspace) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap()])), timeout_s=0.1)
    level.open.clear()
    assert ask(front, "one")["LEVEL"].item() == 1
    asked = len(level.asked)
    # At once, without another call.
    assert ask(front, "two")["LEVEL"].item() == 1 and len(level.asked) == asked
    level.open.set()
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 2)


def test_a_request_past_its_deadline_gets_the_answer_so_far(workspace: Workspace) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap()])))
    level.open.clear()
    assert ask(front, "one", latency_ms=1000)["LEVEL"].item() == 1
    level.open.set()
    # A request's own deadline is no failure of the level.
    assert ask(front, "one")["LEVEL"].item() == 2


def test_too_many_calls_leave_the_first_answer(workspace: Workspace) -> None:
    level = large(workspace)
    table = workspace.table(candidate("both", TWO, [gap()]))
    workspace.most_calls = 2
    front = workspace.open(table)
    level.open.clear()
    first, *others = [text_request(f"t {number}", outputs=ALL) for number in range(6)]
    front.execute([first])
    wait_for(lambda: bool(level.asked))
    front.execute(others)
    # Two calls run.
    assert [values_of(one.sender.answer())["LEVEL"].item() for one in others[1:]] == [1, 1, 1, 1]
    level.open.set()
    assert [values_of(one.sender.answer())["LEVEL"].item() for one in (first, others[0])] == [2, 2]


def test_closing_answers_everything(workspace: Workspace) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap()])), timeout_s=0.6)
    level.open.clear()
    requests = [text_request(f"t {number}", outputs=ALL) for number in range(4)]
    front.execute(requests)
    wait_for(lambda: bool(level.asked))
    workspace.fronts.remove(front)
    front.close()
    for request in requests:
        request.sender.answer()
    level.open.set()


# Refusals.


@pytest.mark.parametrize(
    ("texts", "parameters", "message"),
    [
        (["a", ""], {}, "row 1: TEXT"),
        ([b"\xff"], {}, "UTF-8"),
        (["w " * 600], {}, "at most 512"),
        (["a"], {"level": 3}, "1 to 2"),
        (["a"], {"level": 0}, "1 to 2"),
        (["a"], {"min_accuracy": 0.94}, "at most 0.9300"),
        (["a"], {"task": "x"}, "unknown parameter"),
    ],
)
def test_bad_requests(workspace: Workspace, texts: list[Any], parameters: dict[str, Any], message: str) -> None:
    large(workspace)
    table = workspace.table(
        candidate("both", TWO, [gap(c=0.0)]), candidate("better", TWO, [gap()], accuracy=0.95, ms=9)
    )
    request, good = text_request(*texts, outputs=ALL, parameters=parameters), text_request("fine", outputs=ALL)
    front = workspace.open(table)
    front.execute([request, good])
    code, text = request.refusal()
    assert code == TritonError.INVALID_ARG and message in text
    assert values_of(good.sender.answer())["LEVEL"].item() == 1


def test_a_long_text_may_be_cut_and_an_accuracy_requested(workspace: Workspace) -> None:
    level = large(workspace)
    table = workspace.table(
        candidate("both", TWO, [gap(c=0.0)]), candidate("better", TWO, [gap()], accuracy=0.95, ms=9)
    )
    front = workspace.open(table)
    assert ask(front, "w " * 600, truncate=True)["LEVEL"].item() == 1
    assert not level.asked
    assert ask(front, "a", min_accuracy=0.92)["LEVEL"].item() == 2
    # The next level may cut, too.
    assert ask(front, "w " * 600, min_accuracy=0.92, truncate=True)["LEVEL"].item() == 2
    assert ["truncate" in one for one in level.parameters] == [False, True] and level.asked[1] == [b"w " * 600]
    assert ask(front, "a", min_accuracy=0.5)["LEVEL"].item() == 1


def test_a_table_without_bounds_assures_no_accuracy(workspace: Workspace) -> None:
    """As tables of 0.1 are: the candidate that the registry names serves, and no target is met."""
    large(workspace)
    ours = candidate("both", TWO, [gap(c=0.0)])
    front = workspace.open(workspace.table(dataclasses.replace(ours, accuracy_bound=None)))
    refused = text_request("a", outputs=ALL, parameters={"min_accuracy": 0.5})
    front.execute([refused])
    code, text = refused.refusal()
    assert code == TritonError.INVALID_ARG and "`shapeshift cascade register` again" in text
    assert ask(front, "a", min_accuracy=0.0)["LEVEL"].item() == 1


def test_pairs(workspace: Workspace) -> None:
    level = large(workspace)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(alpha=1.0)]), pairs=True), pairs=True)
    texts: dict[str, Any] = {"TEXT": np.array([[b"alpha beta gamma delta"]], dtype=object)}
    pair = np.array([[b"one two three four five"]], dtype=object)
    request, single = Request(ALL, TEXT_PAIR=pair, **texts), Request(ALL, **texts)
    front.execute([request, single])
    found = values_of(request.sender.answer())
    first, second = level.asked[0]
    assert set(first.split()) <= set(b"alpha beta gamma delta".split())
    assert set(second.split()) <= set(b"one two three four five".split())
    assert 0 < found["WORDS_PRUNED"].item() == 9 - len(first.split()) - len(second.split())
    assert "TEXT_PAIR" in single.refusal()[1]


@pytest.mark.parametrize("wrong", ["task", "checkpoint", "labels", "pairs", "file", "output"])
def test_what_does_not_match_is_not_loaded(workspace: Workspace, wrong: str) -> None:
    table = workspace.table(candidate("both", TWO, [gap()]))
    error: type[Exception] = EngineError
    choices: dict[str, Any] = {}
    if wrong == "task":
        error, choices = NotFoundError, {"task": "other"}
    elif wrong == "checkpoint":
        models = tuple(type(one)(**{**vars(one), "checkpoint_sha256": "0" * 64}) for one in table.models)
        table = type(table)(**{**vars(table), "models": models})
    elif wrong == "labels":
        table = type(table)(**{**vars(table), "labels": ("a", "b", "c")})
    elif wrong == "pairs":
        error, choices = InvalidInputError, {"pairs": True}
    workspace.put(table)
    if wrong == "file":
        error = InvalidInputError
        (workspace.folder / candidates.entries(workspace.folder)["task"].table).write_text("{}")
    if wrong == "output":
        error = EngineError
        workspace.put(workspace.table(candidate("x", ["nowhere"], [])))
    with pytest.raises(error):
        workspace.open(**choices)


def test_serving_loads_the_later_levels_too(workspace: Workspace) -> None:
    workspace.put(workspace.table(candidate("both", TWO, [gap()])))
    workspace.publish()
    assert served_models.with_called(["classify"], [workspace.paths.generated]) == ["classify", "large"]


def test_the_build_completes_the_input_of_pairs(workspace: Workspace) -> None:
    workspace.put(workspace.table(candidate("both", TWO, [gap()]), pairs=True))
    config = model_config.read(workspace.publish() / "config.pbtxt")
    assert [tensor.name for tensor in config.input] == ["TEXT", "TEXT_PAIR"]
    # Another table takes its place before the model is loaded.
    workspace.put(workspace.table(candidate("both", TWO, [gap()])))
    with pytest.raises(InvalidInputError, match="input TEXT_PAIR: got 'listed'; not listed"):
        CascadeFront(workspace.pb_utils, workspace.args(), workspace.levels())


# Metrics and the swap of candidates.


def test_what_is_counted(workspace: Workspace) -> None:
    level = large(workspace)
    alone = candidate("alone", ["large"], [], accuracy=0.95)
    front = workspace.open(workspace.table(candidate("both", TWO, [gap(c=0.6)]), alone))
    found = ask(front, *[f"text number {number}" for number in range(30)])
    level.fail = RuntimeError("boom")
    ask(front, "unsure text", min_accuracy=0.0)
    workspace.fronts.remove(front)
    front.close()
    early = int((found["LEVEL"] == 1).sum())
    metric = workspace.pb_utils.metric
    assert metric("shapeshift_level_texts_total", level="2") == 30 - early
    assert metric("shapeshift_level_texts_total", level="1") == early + 1
    assert metric("shapeshift_control_ms_count") == 31
    assert metric("shapeshift_requests_total", code="OK") == 2
    recent = metric("shapeshift_early_share_recent")
    assert recent == pytest.approx((early + 1) / 31)
    assert metric("shapeshift_first_level_threshold") == 0.6
    assert metric("shapeshift_profiled_accuracy") == 0.9 and metric("shapeshift_profiled_last_level_accuracy") == 0.95
    assert [metric("shapeshift_profiled_level_ms", level=level) for level in "12"] == [3.0, 6.0]
    # The profile said one half.
    assert metric("shapeshift_early_share_drift") == pytest.approx(recent - 0.5)
    assert metric("shapeshift_confidence_drift") == pytest.approx(metric("shapeshift_confidence_recent") - 0.8)


def test_candidates_are_swapped_while_serving(workspace: Workspace) -> None:
    workspace.check_s = 0.02
    large(workspace)
    table = workspace.table(
        candidate("alone", ["small"], []),
        candidate("both", TWO, [gap()]),
        candidate("new", ("small", "later"), [gap()]),
    )
    front = workspace.open(table)
    assert ask(front, "one")["LEVEL"].item() == 1
    workspace.put(table, "both")
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 2)
    # While a level is not ready, the other candidate serves.
    workspace.put(table, "new")
    time.sleep(0.2)
    assert ask(front, "one")["LABEL"].item() == b"LABEL_1"
    large(workspace, (9.0, 0.0), "later")
    wait_for(lambda: ask(front, "one")["LABEL"].item() == b"LABEL_0")
    # A broken registry changes nothing.
    (workspace.folder / "registry.json").write_text("nothing")
    wait_for(lambda: any("keeps serving" in line for line in workspace.pb_utils.Logger.lines))
    assert ask(front, "one")["LABEL"].item() == b"LABEL_0"
    (workspace.folder / "registry.json").unlink()
    workspace.put(table, "alone")
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 1)
    workspace.fronts.remove(front)
    front.close()
    assert workspace.pb_utils.metric("shapeshift_candidate_swaps_total") == 3
    assert workspace.pb_utils.metric("shapeshift_candidate_errors_total") >= 1


def test_candidates_are_in_a_folder(workspace: Workspace) -> None:
    with pytest.raises(InvalidInputError, match="candidates_dir: got 's3://bucket'; a folder"):
        workspace.publish(candidates_dir="s3://bucket")
