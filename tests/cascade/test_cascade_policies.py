"""The decisions of the cascade, against brute force and on degenerate data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from shapeshift.cascade.policy import calibration, pruning, routing, selection
from shapeshift.cascade.policy.routing import softmax
from shapeshift.cli.policy import evaluate
from shapeshift.errors import InvalidInputError


def likelihood(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    """Mean negative log-likelihood, written out."""
    total = 0.0
    for row, label in zip(logits / temperature, labels, strict=True):
        top = max(row)
        total += top + math.log(sum(math.exp(value - top) for value in row)) - row[label]
    return total / len(labels)


@pytest.mark.parametrize("classes", [2, 3, 20])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_is_the_most_likely_one(classes: int, sharpness: float) -> None:
    rng = np.random.default_rng(classes)
    logits = rng.normal(size=(300, classes)) * 2
    labels = np.array([rng.choice(classes, p=softmax(row)) for row in logits])
    # Labels were drawn from these very logits: sharpened by a factor, that factor is their temperature.
    found = calibration.fit_temperature(logits * sharpness, labels)
    assert found == pytest.approx(sharpness, rel=0.25)
    best = likelihood(logits * sharpness, labels, found)
    for other in np.geomspace(calibration.MIN_TEMPERATURE, calibration.MAX_TEMPERATURE, 25):
        assert best <= likelihood(logits * sharpness, labels, float(other)) + 1e-12


@pytest.mark.parametrize(
    ("logits", "labels", "wanted"),
    [
        ([[3.0, 0.0], [0.0, 1.0]], [0, 1], calibration.MIN_TEMPERATURE),
        ([[3.0, 0.0], [0.0, 1.0]], [1, 0], calibration.MAX_TEMPERATURE),
        ([[1.0, 1.0], [2.0, 2.0]], [1, 0], 1.0),
        ([[1e6, 0.0], [0.0, 1e6]], [0, 1], calibration.MIN_TEMPERATURE),
        ([[1e6, 0.0]], [1], calibration.MAX_TEMPERATURE),
        ([[2.0, 0.0]], [0], calibration.MIN_TEMPERATURE),
    ],
)
def test_temperatures_without_a_minimum(logits: Any, labels: Any, wanted: float) -> None:
    assert evaluate("cascade.calibrate", {"logits": logits, "labels": labels}) == {"temperature": wanted}


@pytest.mark.parametrize(
    ("logits", "labels"),
    [([], []), ([[1.0]], [0]), ([[1.0, 2.0]], [2]), ([[1.0, 2.0]], [0, 1]), ([[1, 2], [1]], [0, 0])],
)
def test_samples_that_cannot_be_calibrated(logits: Any, labels: Any) -> None:
    with pytest.raises(InvalidInputError):
        evaluate("cascade.calibrate", {"logits": logits, "labels": labels})


def test_reliability_counts_every_answer_once() -> None:
    rng = np.random.default_rng(0)
    confidence = np.concatenate([rng.random(500), [0.0, 1.0, 0.2, 0.4]])
    right = rng.random(504) < confidence
    table = calibration.reliability(confidence, right, 5)
    assert sum(one.count for one in table) == 504
    for low, high in pairwise(table):
        assert low.high == high.low
    for one in table:
        member = [
            (c, r) for c, r in zip(confidence, right, strict=True) if one.low < c <= one.high or (c == one.low == 0)
        ]
        assert one.count == len(member)
        assert one.confidence == pytest.approx(sum(c for c, _ in member) / len(member))
        assert one.accuracy == pytest.approx(sum(r for _, r in member) / len(member))
    expected = sum(one.count / 504 * abs(one.confidence - one.accuracy) for one in table)
    assert calibration.expected_calibration_error(table) == pytest.approx(expected) and expected < 0.1
    assert calibration.expected_calibration_error(calibration.reliability(np.zeros(0), np.zeros(0))) == 0


@pytest.mark.parametrize("k", [0.0, 5.0, 10.0, 2000.0])
def test_the_sigmoid_is_equation_four(k: float) -> None:
    c = 0.9
    assert routing.sigmoid(c, c, k) == routing.sigmoid(0.1, c, k) == 1
    for con in (0.9001, 0.93, 0.95, 0.999, 1.0):
        norm = (con - c) / (1 - c) - 0.5
        wanted = 1 / (1 + math.exp(k * norm)) if k * norm < 700 else 0.0
        assert routing.sigmoid(con, c, k) == pytest.approx(wanted, rel=1e-9, abs=1e-300)
    assert routing.sigmoid(1.0, 1.0, k) == routing.cut(1.0, 1.0, k) == 1
    assert routing.cut(c, c, k) == 1 and routing.cut(c + 1e-9, c, k) == 0


def test_even_a_text_of_confidence_one_may_go_on() -> None:
    found = evaluate("cascade.route", {"confidence": 1, "c": 0.95, "k": 10})
    assert found["p_large"] == pytest.approx(0.0066929, rel=1e-4) and found["algorithm"] == "sigmoid"
    by_logits = evaluate(
        "cascade.route", {"logits": [2.0, 0.0], "temperature": 2, "c": 0.5, "k": 10, "algorithm": "cut"}
    )
    assert by_logits == {"confidence": pytest.approx(1 / (1 + math.exp(-1))), "p_large": 0.0, "algorithm": "cut"}


@pytest.mark.parametrize(
    "change",
    [
        {"confidence": None},
        {"logits": [1.0, 2.0]},
        {"confidence": 1.5},
        {"c": 1.01},
        {"k": -1},
        {"temperature": 0},
        {"algorithm": "linear"},
        {"extra": 1},
    ],
)
def test_routes_that_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        evaluate("cascade.route", {"confidence": 0.7, "c": 0.9, "k": 10, **change})


def pruned_by_hand(importance: Any, special: Any, word_ids: Any, alpha: float) -> tuple[list[int], list[int]]:
    counted = [i for i, (s, w) in enumerate(zip(special, word_ids, strict=True)) if not s and w is not None]
    words = max([w for w in word_ids if w is not None], default=-1) + 1
    if not counted:
        return [1] * len(importance), [1] * words
    mean = sum(importance[i] for i in counted) / len(counted)
    tokens = [1 if i not in counted or importance[i] > alpha * mean else 0 for i in range(len(importance))]
    of_word = {w: [tokens[i] for i in counted if word_ids[i] == w] for w in range(words)}
    mask = [1 if not of_word[w] or any(of_word[w]) else 0 for w in range(words)]
    if not any(tokens[i] for i in counted):
        return [1] * len(importance), [1] * words
    return tokens, mask


def test_pruning_is_equation_five_on_words() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        length = int(rng.integers(1, 12))
        importance = rng.integers(0, 5, length).astype(float).tolist()
        special = (rng.random(length) < 0.2).tolist()
        word_ids = [None if rng.random() < 0.1 else int(w) for w in np.cumsum(rng.integers(0, 2, length))]
        alpha = float(rng.choice([0, 0.5, 0.7, 1, 1.5, 9]))
        found = evaluate(
            "cascade.prune", {"importance": importance, "special": special, "word_ids": word_ids, "alpha": alpha}
        )
        tokens, words = pruned_by_hand(importance, special, word_ids, alpha)
        assert found == {"token_mask": tokens, "word_mask": words}


def test_pruning_keeps_something() -> None:
    for importance in ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]):
        masks = pruning.masks(np.array(importance), np.array([0, 1, 1]), 2, 1.0)
        assert masks.words.tolist() == [1, 1] and masks.tokens.tolist() == [1, 1, 1]
    assert pruning.masks(np.zeros(0), np.zeros(0, np.int64), 0, 0.5).words.tolist() == []
    special = pruning.masks(np.array([9.0, 1.0, 3.0, 9.0]), np.array([-1, 0, 1, -1]), 2, 0.6)
    assert special.words.tolist() == [0, 1] and special.tokens.tolist() == [1, 0, 1, 1]


def test_the_ensemble_is_equation_six() -> None:
    found = evaluate("cascade.ensemble", {"small": [1.0, 0.0], "large": [0.0, 3.0], "w": 0.75})["s"]
    small = [math.e / (1 + math.e), 1 / (1 + math.e)]
    large = [1 / (1 + math.e**3), math.e**3 / (1 + math.e**3)]
    assert found == pytest.approx([0.75 * b + 0.25 * a for a, b in zip(small, large, strict=True)])
    assert routing.ensemble_weight([1, 0, 0, 0], [1, 1, 1, 0]) == 0.75
    assert routing.ensemble_weight([0, 0], [0, 0]) == 0.5 == routing.ensemble_weight([], [])
    with pytest.raises(InvalidInputError):
        evaluate("cascade.ensemble", {"small": [1.0], "large": [0.0, 3.0], "w": 0.75})


def candidate(name: str, accuracy: float, latency: float, p75: float = 1, models: tuple[float, ...] = (1,)) -> Any:
    return {"name": name, "accuracy": accuracy, "latency": latency, "p75": p75, "model_latencies": list(models)}


@dataclass(frozen=True)
class Measured:
    name: str
    accuracy: float
    assured_accuracy: float
    latency_ms: float
    p75_ms: float
    model_latencies: tuple[float, ...]


def test_selection_by_trying_all() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        candidates = [
            Measured(
                str(number),
                float(rng.integers(84, 88)),
                float(rng.integers(80, 84)),
                float(rng.integers(1, 6)),
                float(rng.integers(1, 12)),
                tuple(map(float, rng.integers(1, 9, rng.integers(1, 4)))),
            )
            for number in range(int(rng.integers(0, 7)))
        ]
        best = None
        for one in candidates:
            if one.assured_accuracy >= 81 and one.latency_ms <= 4 and one.p75_ms <= 1.5 * max(one.model_latencies):
                key = (one.latency_ms, -one.accuracy, one.name)
                best = min(best, (key, one)) if best else (key, one)
        found = selection.select(candidates, 81, 4)
        assert found == (best[1] if best else None)
        near = selection.nearest(candidates, 81, 4)
        assert (near is None) == (not any(map(selection.is_practical, candidates)))
        if found is None and near is not None:
            assert near.assured_accuracy < 81 or near.latency_ms > 4


def test_equality_meets_the_targets_and_ties_are_settled() -> None:
    given = {
        "candidates": [
            candidate("b", 0.9, 5, 7.5, (2, 5)),
            candidate("a", 0.9, 5, 7.5, (5,)),
            candidate("slow tail", 0.99, 1, 7.6, (5,)),
            candidate("c", 0.89, 1, 1, (5,)),
        ],
        "min_accuracy": 0.9,
        "max_latency": 5,
    }
    assert evaluate("cascade.select", given) == {"selected": "a"}
    assert evaluate("cascade.select", {**given, "max_latency": 4.9}) == {"selected": None}
    assert evaluate("cascade.select", {**given, "candidates": []}) == {"selected": None}
    with pytest.raises(InvalidInputError):
        evaluate("cascade.select", {**given, "candidates": [candidate("a", 1, 1), candidate("a", 1, 1)]})


def test_agreement_of_numbers_is_learnt() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(2000, 4))
    true = np.array([2.0, -1.0, 0.0, 0.5, 0.3])
    likely = 1 / (1 + np.exp(-(rows @ true[:-1] + true[-1])))
    agree = (rng.random(2000) < likely).astype(float)
    weights = calibration.fit_agreement(rows, agree, penalty=1e-6)
    assert weights == pytest.approx(true, abs=0.25)
    found = np.array([routing.agreement(row, weights) for row in rows])
    assert np.abs(found - likely).mean() < 0.03
    # The most likely model's mean is the share of agreements.
    assert found.mean() == pytest.approx(agree.mean(), abs=1e-6)


def test_agreement_without_two_kinds_or_with_parted_data() -> None:
    rows = np.array([[1.0], [2.0], [3.0], [4.0]])
    always = calibration.fit_agreement(rows, np.ones(4))
    assert routing.agreement(rows[0], always) == pytest.approx(0.9) and always[0] == 0
    assert routing.agreement(rows[0], calibration.fit_agreement(rows, np.zeros(4))) == pytest.approx(0.1)
    parted = calibration.fit_agreement(rows, np.array([0, 0, 1, 1]), penalty=1e-3)
    assert np.isfinite(parted).all() and parted[0] > 0
    assert routing.agreement(np.array([1e6]), parted) == 1 and routing.agreement(np.array([-1e6]), parted) == 0
    with pytest.raises(ValueError, match="at least 1"):
        calibration.fit_agreement(np.zeros((0, 3)), np.zeros(0))
