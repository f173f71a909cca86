"""Predictors of answer lengths and of the next adapters."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from shapeshift.adapter_cache.policy.length_prediction import Oracle, PredictionInput, RunningMean, WordRegressor
from shapeshift.adapter_cache.policy.prefetch import MIN_GAPS, GapHistograms
from shapeshift.adapter_cache.policy.scheduling import AdapterInfo
from shapeshift.errors import InvalidInputError


def prediction_input(adapter: str | None = None, most: int = 100, **known: object) -> PredictionInput:
    return PredictionInput(adapter, 10, most, **known)  # type: ignore[arg-type]


def test_a_running_mean_is_each_adapters_own() -> None:
    mean = RunningMean()
    assert mean.predict(prediction_input("a")) == 100, "no answer yet"
    for tokens in (10, 20, 30):
        mean.learn(prediction_input("a"), tokens)
    mean.learn(prediction_input(None), 60)
    assert (mean.predict(prediction_input("a")), mean.predict(prediction_input(None))) == (20, 60)
    assert mean.predict(prediction_input("new")) == 30, "the mean over all"
    assert mean.predict(prediction_input("a", most=5)) == 5


def test_a_running_mean_follows_a_change() -> None:
    mean = RunningMean(memory=20)
    for _ in range(500):
        mean.learn(prediction_input("a"), 10)
    for _ in range(60):
        mean.learn(prediction_input("a"), 90)
    assert 80 <= mean.predict(prediction_input("a")) <= 90


def test_adapters_without_recent_requests_are_forgotten() -> None:
    mean = RunningMean(max_adapters=3)
    for name in "abcda":
        mean.learn(prediction_input(name), 50)
    mean.learn(prediction_input("e"), 8)
    assert [mean.predict(prediction_input(name)) for name in "dae"] == [50, 50, 8]
    assert mean.predict(prediction_input("b")) == mean.predict(prediction_input("never")) < 50


def test_a_running_mean_is_for_any_thread() -> None:
    mean = RunningMean()

    def work() -> None:
        for _ in range(2000):
            mean.learn(prediction_input("a"), 40)
            assert mean.predict(prediction_input("a")) == 40

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mean.predict(prediction_input("a")) == 40


def lengths(count: int, seed: int) -> tuple[list[bytes], list[int]]:
    """Prompts, and their answers' tokens: what is asked for decides them, the subject does not."""
    rng = np.random.default_rng(seed)
    kinds = {b"Name in one word": 3, b"Explain": 90, b"Write a story on": 250}
    subjects = [f"subject {number}".encode() for number in range(40)]
    chosen = [(bytes(rng.choice(list(kinds))), bytes(rng.choice(subjects))) for _ in range(count)]
    return [b"%b %b." % pair for pair in chosen], [int(kinds[kind] * rng.uniform(0.8, 1.2)) for kind, _ in chosen]


def test_words_tell_what_a_mean_cannot(tmp_path: Path) -> None:
    WordRegressor.train(*lengths(200, 0)).save(tmp_path / "weights.npy")
    words, mean = WordRegressor.load(tmp_path / "weights.npy"), RunningMean()
    errors: dict[str, list[float]] = {"words": [], "mean": []}
    for text, tokens in zip(*lengths(100, 1), strict=True):
        request = prediction_input(most=1000, text=text)
        errors["words"].append(abs(np.log(words.predict(request) / tokens)))
        errors["mean"].append(abs(np.log(mean.predict(request) / tokens)))
        mean.learn(request, tokens)
    assert np.mean(errors["words"]) < 0.3 * np.mean(errors["mean"][20:])
    assert words.predict(prediction_input(most=5, text=b"Write a story on subject 1.")) == 5
    assert words.predict(prediction_input(text="Ä ".encode() * 10**6)) >= 1, "a long prompt of other letters"


def test_words_leave_adapters_and_prompts_of_tokens_to_their_mean() -> None:
    words = WordRegressor.train(*lengths(50, 0))
    words.learn(prediction_input("a"), 12)
    words.learn(prediction_input(None), 20)
    assert words.predict(prediction_input("a", text=b"Write a story on subject 1.")) == 12
    assert words.predict(prediction_input(None)) == 20


def test_invalid_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="predictor"):
        WordRegressor.load(tmp_path / "absent.npy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInputError, match="predictor"):
        WordRegressor.load(tmp_path / "objects.npy")
    for bad in (np.full(8193, np.nan), np.ones(386), np.ones((8193, 1))):
        with pytest.raises(InvalidInputError, match="weights"):
            WordRegressor(bad)


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.6])
def test_an_oracle_has_the_given_accuracy(accuracy: float) -> None:
    oracle = Oracle(accuracy, seed=1)
    guesses = [oracle.predict(prediction_input(most=5000, truth=77)) for _ in range(4000)]
    assert np.mean(np.array(guesses) == 77) == pytest.approx(accuracy, abs=0.02)
    assert all(1 <= guess <= 5000 for guess in guesses)


def test_an_oracle_needs_the_truth() -> None:
    with pytest.raises(InvalidInputError, match="truth"):
        Oracle(1.0).predict(prediction_input())
    with pytest.raises(InvalidInputError, match="accuracy: got 1.5; 0 to 1"):
        Oracle(1.5)


# The next adapters.


def test_regular_requests_are_predicted_when_they_are_due() -> None:
    histograms = GapHistograms()
    for turn in range(20):
        histograms.record("even", turn * 10.0)
    last = 190.0
    assert histograms.probability("even", last + 0.5, 1.0) == 0
    assert histograms.probability("even", last + 7.0, 5.0) > 0.9
    assert histograms.probability("even", last + 1000.0, 5.0) == 0, "all gaps have passed"


def test_the_probabilities_of_a_poisson_process_follow_its_rate() -> None:
    rng, histograms, now = np.random.default_rng(0), GapHistograms(), 0.0
    for gap in rng.exponential(4.0, 3000):
        now += gap
        histograms.record("a", now)
    for waited in (0.0, 2.0, 6.0):
        assert histograms.probability("a", now + waited, 3.0) == pytest.approx(1 - np.exp(-3 / 4), abs=0.07)


def test_few_gaps_predict_nothing() -> None:
    histograms = GapHistograms(max_adapters=2)
    for turn in range(MIN_GAPS):
        histograms.record("a", float(turn))
    assert histograms.probability("a", 3.5, 5.0) == 0 and histograms.probability("never", 3.5, 5.0) == 0
    histograms.record("a", float(MIN_GAPS))
    assert histograms.probability("a", MIN_GAPS + 0.1, 5.0) > 0.5
    for name, at in (("b", 10.0), ("c", 11.0), ("a", 12.0)):
        histograms.record(name, at)
    assert histograms.probability("a", 12.1, 5.0) == 0, "of more adapters than it remembers the oldest is forgotten"


def test_a_plan_fills_idle_memory_with_the_likeliest() -> None:
    histograms = GapHistograms()
    gaps = {"often": 1.0, "sometimes": 3.0, "seldom": 500.0, "here": 1.0, "large": 1.0}
    for name, gap in gaps.items():
        for turn in range(10):
            histograms.record(name, 5000.0 - gap * (9 - turn))
    adapters = [AdapterInfo(name, 8, 100 if name == "large" else 10) for name in gaps]
    now = 5000.5
    assert histograms.plan(adapters, {"here"}, 25, now) == ["often", "sometimes"]
    assert histograms.plan(adapters, {"here"}, 15, now) == ["often"]
    assert histograms.plan(adapters, {"here"}, 500, now) == ["large", "often", "sometimes"]
    assert histograms.plan(adapters, set(gaps), 500, now) == []
    with pytest.raises(InvalidInputError, match="horizon_s"):
        histograms.plan(adapters, set(), 5, now, horizon_s=0.0)
