"""The cascade from Triton's request to its response."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shapeshift.cascade import calls as calls_module
from shapeshift.cascade import registry
from shapeshift.cascade.softmax import softmax
from shapeshift.errors import EngineError, InvalidInputError, NotFoundError
from tests.cascade.conftest import ALL, LABELS, FakeLevel, candidate, gap
from tests.conftest import LIGHT_WIDTH
from tests.fakes import Request, TritonError, text_request, values_of
from tests.waiting import wait_for

if TYPE_CHECKING:
    from tests.cascade.conftest import House

TWO = ("small", "large")


def ask(front: Any, *texts: str, **parameters: Any) -> dict[str, np.ndarray]:
    request = text_request(*texts, outputs=ALL, parameters=parameters)
    front.execute([request])
    return values_of(request.sender.answer())


def large(house: House, logits: tuple[float, ...] = (0.0, 4.0), name: str = "large") -> FakeLevel:
    house.pb_utils.models[name] = level = FakeLevel(logits)
    return level


def test_a_sure_query_is_answered_by_the_first_level(house: House) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap(c=0.0)])))
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


def test_an_unsure_query_gets_the_ensemble_of_both(house: House) -> None:
    level = large(house, (0.0, 4.0))
    front = house.open(house.table(candidate("both", TWO, [gap(w=0.6, temperature=2.0)])))
    only_small, both = ask(front, "one two", level=1), ask(front, "one two")
    assert (only_small["LEVEL"].item(), both["LEVEL"].item()) == (1, 2)
    assert level.asked == [[b"one two"]] and level.outputs == [["LOGITS", "ENGINE_MS"]]
    # The first level's confidence is calibrated (T = 1.5); what it puts into the ensemble is softmax at T = 1.
    spread = np.log(only_small["PROBABILITIES"][0]) * 1.5
    s = 0.6 * softmax(np.array([0.0, 4.0])) + 0.4 * softmax(spread)
    np.testing.assert_allclose(both["PROBABILITIES"][0], s, rtol=1e-4)
    np.testing.assert_allclose(both["CONFIDENCE"].item(), softmax(np.log(s), 2.0).max(), rtol=1e-4)
    # The second level says 7 ms of itself.
    assert both["ENGINE_MS"].item() > 7 and only_small["ENGINE_MS"].item() > 0


def test_only_the_unsure_rows_of_a_request_go_on(house: House) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap(c=0.6)])))
    texts = [f"text number {number}" for number in range(30)]
    sure = ask(front, *texts, level=1)["CONFIDENCE"][:, 0] > 0.6
    assert 0 < sure.sum() < 30
    found = ask(front, *texts)
    np.testing.assert_array_equal(found["LEVEL"][:, 0], np.where(sure, 1, 2))
    assert [one[0].decode() for one in level.asked] == [text for text, own in zip(texts, sure, strict=True) if not own]
    assert len(level.outputs) == 1


def test_words_are_pruned_by_importance(house: House) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap(alpha=1.0)])))
    text = "the  quick brown\tfox jumps over the lazy dog"
    found = ask(front, text)
    (left,) = level.asked[0]
    kept = left.decode().split()
    words = text.split()
    assert 0 < found["WORDS_PRUNED"].item() == len(words) - len(kept) < len(words)
    # Emulated importance follows the ids: equal words share their fate.
    assert kept == [word for word in words if word in kept]
    whole = ask(front, "a")
    assert whole["WORDS_PRUNED"].item() == 0 and level.asked[1] == [b"a"]


def test_three_levels(house: House) -> None:
    middle, last = large(house, (0.1, 0.0), "middle"), large(house, (0.0, 9.0), "large")
    levels = ("small", "middle", "large")
    front = house.open(house.table(candidate("three", levels, [gap(w=0.5), gap(w=0.5)])))
    found = ask(front, "one")
    assert found["LEVEL"].item() == 3 and len(middle.asked) == len(last.asked) == 1
    first = ask(front, "one", level=1)["PROBABILITIES"][0]
    s = 0.5 * softmax(np.array([0.1, 0.0])) + 0.5 * softmax(np.log(first) * 1.5)
    np.testing.assert_allclose(found["PROBABILITIES"][0], 0.5 * softmax(np.array([0.0, 9.0])) + 0.5 * s, rtol=1e-4)
    middle.logits = [50.0, 0.0]
    alone = ask(front, "one", level=2)
    assert alone["LEVEL"].item() == 2 and alone["LABEL"].item() == b"LABEL_0" and len(last.asked) == 1


def test_the_draws_follow_the_seed(house: House) -> None:
    large(house)
    sigmoid = gap(c=0.0).__class__(0.4, 4.0, "sigmoid", 0.0, 0.5)
    table = house.table(candidate("both", TWO, [sigmoid]))
    texts = [f"text {number}" for number in range(40)]
    runs = [ask(house.open(table, seed=seed), *texts)["LEVEL"][:, 0].tolist() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2] and set(runs[0]) == {1, 2}


def test_a_regression_goes_on_where_the_models_may_disagree(house: House) -> None:
    level = large(house, (4.0,))
    texts = [f"text {number}" for number in range(20)]

    def serve(constant: float) -> Any:
        agreement = (9.0,) + (0.0,) * (LIGHT_WIDTH - 1) + (constant,)
        both = candidate("both", ("number", "large"), [gap(c=0.5, w=0.75, agreement=agreement)])
        table = house.table(both, kind="regression", labels=("LABEL_0",), tolerance=0.5)
        return house.open(table)

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
    # What lies far on one side goes all one way.
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
def test_a_level_that_fails_leaves_the_answer_there_was(house: House, fault: Any) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap(alpha=1.0)])), retry_ms=1)
    before = ask(front, "one two three four", level=1)
    if fault == "not there":
        del house.pb_utils.models["large"]
    elif isinstance(fault, tuple):
        level.logits = list(fault)
    else:
        level.fail = fault
    found = ask(front, "one two three four")
    for name in ("LABEL", "PROBABILITIES", "CONFIDENCE", "LEVEL", "WORDS_PRUNED"):
        np.testing.assert_array_equal(found[name], before[name])
    # Whoever asked for that very level is told.
    refused = text_request("one", outputs=ALL, parameters={"level": 2})
    time.sleep(0.01)
    front.execute([refused])
    assert refused.sender.answer().error() is not None
    level.fail, level.logits = None, [0.0, 4.0]
    house.pb_utils.models["large"] = level
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 2)


def test_a_level_that_hangs_is_given_up_and_left_alone(house: House) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap()])), call_timeout_ms=100, retry_ms=2000, call_threads=2)
    level.open.clear()
    assert ask(front, "one")["LEVEL"].item() == 1
    asked = len(level.asked)
    # At once, without another call.
    assert ask(front, "two")["LEVEL"].item() == 1 and len(level.asked) == asked
    level.open.set()
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 2)


def test_a_request_that_runs_out_of_time_gets_what_there_is(house: House) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap()])), call_timeout_ms=30_000)
    level.open.clear()
    assert ask(front, "one", latency_ms=1000)["LEVEL"].item() == 1
    level.open.set()
    # That the caller was impatient says nothing of the level.
    assert ask(front, "one")["LEVEL"].item() == 2


def test_too_many_calls_leave_the_first_answer(house: House) -> None:
    level = large(house)
    table = house.table(candidate("both", TWO, [gap()]))
    front = house.open(table, call_threads=1, queue_calls=1, call_timeout_ms=60_000)
    level.open.clear()
    first, *others = [text_request(f"t {number}", outputs=ALL) for number in range(6)]
    front.execute([first])
    wait_for(lambda: bool(level.asked))
    front.execute(others)
    # One is asked about, one waits.
    assert [values_of(one.sender.answer())["LEVEL"].item() for one in others[1:]] == [1, 1, 1, 1]
    level.open.set()
    assert [values_of(one.sender.answer())["LEVEL"].item() for one in (first, others[0])] == [2, 2]


def test_closing_answers_everything(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    from shapeshift.cascade import cascade as cascade_module

    monkeypatch.setattr(cascade_module, "_DRAIN_S", 0.2)
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap()])), call_timeout_ms=600)
    level.open.clear()
    requests = [text_request(f"t {number}", outputs=ALL) for number in range(4)]
    front.execute(requests)
    wait_for(lambda: bool(level.asked))
    house.fronts.remove(front)
    front.close()
    for request in requests:
        request.sender.answer()
    level.open.set()


# What is refused.


@pytest.mark.parametrize(
    ("texts", "parameters", "message"),
    [
        (["a", ""], {}, "row 1: TEXT"),
        ([b"\xff"], {}, "UTF-8"),
        (["w " * 600], {}, "at most 512"),
        (["a"], {"level": 3}, "1 to 2"),
        (["a"], {"level": 0}, "1 to 2"),
        (["a"], {"min_accuracy": 0.99}, "at most 0.95"),
        (["a"], {"task": "x"}, "unknown parameter"),
    ],
)
def test_bad_requests(house: House, texts: list[Any], parameters: dict[str, Any], message: str) -> None:
    large(house)
    table = house.table(candidate("both", TWO, [gap(c=0.0)]), candidate("better", TWO, [gap()], accuracy=0.95, ms=9))
    request, good = text_request(*texts, outputs=ALL, parameters=parameters), text_request("fine", outputs=ALL)
    front = house.open(table)
    front.execute([request, good])
    code, text = request.refusal()
    assert code == TritonError.INVALID_ARG and message in text
    assert values_of(good.sender.answer())["LEVEL"].item() == 1


def test_a_long_text_may_be_cut_and_an_accuracy_wished_for(house: House) -> None:
    level = large(house)
    table = house.table(candidate("both", TWO, [gap(c=0.0)]), candidate("better", TWO, [gap()], accuracy=0.95, ms=9))
    front = house.open(table)
    assert ask(front, "w " * 600, truncate=True)["LEVEL"].item() == 1
    assert not level.asked
    assert ask(front, "a", min_accuracy=0.92)["LEVEL"].item() == 2
    # The next level is told that it, too, may cut.
    assert ask(front, "w " * 600, min_accuracy=0.92, truncate=True)["LEVEL"].item() == 2
    assert level.parameters == ["", '{"truncate": true}'] and level.asked[1] == [b"w " * 600]
    assert ask(front, "a", min_accuracy=0.5)["LEVEL"].item() == 1


def test_pairs(house: House) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap(alpha=1.0)]), pairs=True), pairs=True)
    texts = {"TEXT": np.array([[b"alpha beta gamma delta"]], dtype=object)}
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
def test_what_does_not_match_is_not_loaded(house: House, wrong: str) -> None:
    table = house.table(candidate("both", TWO, [gap()]))
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
        error, table = InvalidInputError, type(table)(**{**vars(table), "pairs": True})
    house.put(table)
    if wrong == "file":
        error = InvalidInputError
        (house.folder / "task.json").write_text("{}")
    if wrong == "output":
        error = EngineError
        models = tuple(type(one)(**{**vars(one), "name": "nowhere"}) for one in table.models)
        table = type(table)(**{**vars(table), "models": models, "candidates": (candidate("x", ["nowhere"], []),)})
        house.put(type(table)(**{**vars(table), "models": models[:1]}))
    with pytest.raises(error):
        house.open(**choices)


# Metrics and the exchange of candidates.


def test_what_is_counted(house: House) -> None:
    level = large(house)
    front = house.open(house.table(candidate("both", TWO, [gap(c=0.6)])))
    found = ask(front, *[f"text number {number}" for number in range(30)])
    level.fail = RuntimeError("boom")
    ask(front, "unsure text", min_accuracy=0.0)
    house.fronts.remove(front)
    front.close()
    early = int((found["LEVEL"] == 1).sum())
    metric = house.pb_utils.metric
    assert metric("shapeshift_level_texts_total", level="2") == 30 - early
    assert metric("shapeshift_level_texts_total", level="1") == early + 1
    assert metric("shapeshift_control_ms_count") == 31
    assert metric("shapeshift_requests_total", code="OK") == 2
    recent = metric("shapeshift_early_share_recent")
    assert recent == pytest.approx((early + 1) / 31)
    # The profile said one half.
    assert metric("shapeshift_early_share_drift") == pytest.approx(recent - 0.5)
    assert metric("shapeshift_confidence_drift") == pytest.approx(metric("shapeshift_confidence_recent") - 0.8)


def test_candidates_are_exchanged_while_serving(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    from shapeshift.cascade import exchange

    monkeypatch.setattr(exchange, "_LOOK_S", 0.02)
    monkeypatch.setattr(exchange, "_ASK_S", 0.02)
    large(house)
    table = house.table(
        candidate("alone", ["small"], []),
        candidate("both", TWO, [gap()]),
        candidate("new", ("small", "later"), [gap()]),
    )
    front = house.open(table)
    assert ask(front, "one")["LEVEL"].item() == 1
    house.put(table, "both")
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 2)
    # A level that is not there yet is waited for, while the other candidate serves.
    house.put(table, "new")
    time.sleep(0.2)
    assert ask(front, "one")["LABEL"].item() == b"LABEL_1"
    large(house, (9.0, 0.0), "later")
    wait_for(lambda: ask(front, "one")["LABEL"].item() == b"LABEL_0")
    # What is broken changes nothing.
    (house.folder / "registry.json").write_text("nothing")
    wait_for(lambda: any("stay as they were" in line for line in house.pb_utils.Logger.lines))
    assert ask(front, "one")["LABEL"].item() == b"LABEL_0"
    (house.folder / "registry.json").write_text("{}")
    house.put(table, "alone")
    wait_for(lambda: ask(front, "one")["LEVEL"].item() == 1)
    house.fronts.remove(front)
    front.close()
    assert house.pb_utils.metric("shapeshift_candidate_swaps_total") == 3
    assert house.pb_utils.metric("shapeshift_candidate_errors_total") >= 1


def test_targets_choose_unless_a_candidate_is_pinned(house: House) -> None:
    large(house)
    table = house.table(
        candidate("alone", ["small"], [], accuracy=0.8, ms=3), candidate("both", TWO, [gap()], accuracy=0.95, ms=9)
    )
    assert ask(house.open(table, min_accuracy=0.9), "one")["LEVEL"].item() == 2
    assert ask(house.open(table, min_accuracy=0.9, max_latency_ms=5), "one")["LEVEL"].item() == 1
    assert any("no candidate of task task meets" in line for line in house.pb_utils.Logger.lines)
    registry.put(house.folder, table, "alone", pinned=True)
    assert ask(house.open(min_accuracy=0.9), "one")["LEVEL"].item() == 1


def test_calls_in_the_pool_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shapeshift.cascade.levels import Found, LevelGoneError

    monkeypatch.setattr(calls_module, "_LOOK_S", 0.002)
    pool = calls_module.CallPool(4, 1000, 0.01, 0.001)
    outcomes: list[Any] = []

    def slow(number: int) -> Found:
        time.sleep(0.002 * (number % 9))
        return Found([], None)

    refused = 0
    for number in range(200):
        try:
            pool.submit("m", lambda number=number: slow(number), outcomes.append)
        except LevelGoneError:
            refused += 1
            time.sleep(0.002)
    wait_for(lambda: len(outcomes) + refused == 200)
    time.sleep(0.05)
    assert len(outcomes) + refused == 200 and pool.under_way == 0
    assert any(isinstance(one, Found) for one in outcomes)
    pool.close()
