"""Predictors of an answer's length, and of which adapters will be asked for."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from shapeshift.adapter_cache.interfaces import AdapterInfo
from shapeshift.adapter_cache.predict import Asked, Oracle, Regressor, RunningMean
from shapeshift.adapter_cache.prefetch import LEAST_GAPS, Histograms, plan
from shapeshift.errors import InvalidInputError


def asked(adapter: str | None = None, most: int = 100, **known: object) -> Asked:
    return Asked(adapter, 10, most, **known)  # type: ignore[arg-type]


def test_a_running_mean_is_each_adapters_own() -> None:
    mean = RunningMean()
    assert mean.predict(asked("a")) == 100, "nothing is known"
    for tokens in (10, 20, 30):
        mean.learn(asked("a"), tokens)
    mean.learn(asked(None), 60)
    assert (mean.predict(asked("a")), mean.predict(asked(None))) == (20, 60)
    assert mean.predict(asked("new")) == 30, "the mean over all"
    assert mean.predict(asked("a", most=5)) == 5


def test_a_running_mean_follows_a_change() -> None:
    mean = RunningMean(memory=20)
    for _ in range(500):
        mean.learn(asked("a"), 10)
    for _ in range(60):
        mean.learn(asked("a"), 90)
    assert 80 <= mean.predict(asked("a")) <= 90


def test_adapters_that_are_not_heard_of_any_more_are_forgotten() -> None:
    mean = RunningMean(most_adapters=3)
    for name in "abcda":
        mean.learn(asked(name), 50)
    mean.learn(asked("e"), 8)
    assert set(mean._means) == {"d", "a", "e"}


def test_a_running_mean_is_for_any_thread() -> None:
    mean = RunningMean()

    def work() -> None:
        for _ in range(2000):
            mean.learn(asked("a"), 40)
            assert mean.predict(asked("a")) == 40

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mean.predict(asked("a")) == 40


def lengths(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings, prompts' tokens, and answers' tokens that follow from both, with noise."""
    rng = np.random.default_rng(seed)
    embeddings = rng.standard_normal((count, 8))
    prompts = rng.integers(1, 200, count)
    exponents = 3 + embeddings @ np.linspace(-0.4, 0.4, 8) + 0.2 * np.log1p(prompts)
    return embeddings, prompts, np.exp(exponents + rng.normal(0, 0.1, count)).astype(int) + 1


def test_a_regressor_learns_what_a_mean_cannot(tmp_path: Path) -> None:
    Regressor.train(*lengths(500, 0)).save(tmp_path / "weights.npy")
    regressor, mean = Regressor.load(tmp_path / "weights.npy"), RunningMean()
    embeddings, prompts, answers = lengths(200, 1)
    errors: dict[str, list[float]] = {"regressor": [], "mean": []}
    for embedding, prompt, answer in zip(embeddings, prompts, answers, strict=True):
        given = Asked(None, int(prompt), 10_000, embedding)
        errors["regressor"].append(abs(np.log(regressor.predict(given) / answer)))
        errors["mean"].append(abs(np.log(mean.predict(given) / answer)))
        mean.learn(given, int(answer))
    assert np.mean(errors["regressor"]) < 0.4 * np.mean(errors["mean"][20:])
    assert regressor.predict(Asked(None, 10, 3, embeddings[0])) <= 3


def test_a_regressor_without_an_embedding_falls_back() -> None:
    regressor = Regressor(np.zeros(4))
    regressor.learn(asked("a"), 12)
    assert regressor.predict(asked("a")) == 12
    assert regressor.predict(asked("a", embedding=np.ones(2))) == 1
    with pytest.raises(InvalidInputError, match=r"embedding: got \(3,\); must be \[2\]"):
        regressor.predict(asked("a", embedding=np.ones(3)))


def test_weights_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="predictor"):
        Regressor.load(tmp_path / "absent.npy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInputError, match="predictor"):
        Regressor.load(tmp_path / "objects.npy")
    for bad in (np.full(4, np.nan), np.ones(2), np.ones((3, 3))):
        with pytest.raises(InvalidInputError, match="weights"):
            Regressor(bad)


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.6])
def test_an_oracle_is_right_as_often_as_it_is_told(accuracy: float) -> None:
    oracle = Oracle(accuracy, seed=1)
    guesses = [oracle.predict(asked(most=5000, truth=77)) for _ in range(4000)]
    assert np.mean(np.array(guesses) == 77) == pytest.approx(accuracy, abs=0.02)
    assert all(1 <= guess <= 5000 for guess in guesses)


def test_an_oracle_needs_the_truth() -> None:
    with pytest.raises(InvalidInputError, match="truth"):
        Oracle(1.0).predict(asked())
    with pytest.raises(InvalidInputError, match="accuracy: got 1.5; 0 to 1"):
        Oracle(1.5)


# Which adapters.


def test_what_comes_at_even_intervals_is_expected_when_it_is_due() -> None:
    known = Histograms()
    for turn in range(20):
        known.arrived("even", turn * 10.0)
    last = 190.0
    assert known.probability("even", last + 0.5, 1.0) == 0
    assert known.probability("even", last + 7.0, 5.0) > 0.9
    assert known.probability("even", last + 1000.0, 5.0) == 0, "all known gaps are past"


def test_chances_of_a_memoryless_stream_are_those_of_its_rate() -> None:
    rng, known, now = np.random.default_rng(0), Histograms(), 0.0
    for gap in rng.exponential(4.0, 3000):
        now += gap
        known.arrived("a", now)
    for waited in (0.0, 2.0, 6.0):
        assert known.probability("a", now + waited, 3.0) == pytest.approx(1 - np.exp(-3 / 4), abs=0.07)


def test_little_is_believed_of_what_came_seldom() -> None:
    known = Histograms(most_adapters=2)
    for turn in range(LEAST_GAPS):
        known.arrived("a", float(turn))
    assert known.probability("a", 3.5, 5.0) == 0 and known.probability("never", 3.5, 5.0) == 0
    known.arrived("a", float(LEAST_GAPS))
    assert known.probability("a", LEAST_GAPS + 0.1, 5.0) > 0.5
    known.arrived("b", 10.0)
    known.arrived("c", 11.0)
    assert set(known._gaps) == {"b", "c"}


def test_a_plan_fills_idle_memory_with_the_likeliest() -> None:
    known = Histograms()
    gaps = {"often": 1.0, "sometimes": 3.0, "seldom": 500.0, "here": 1.0, "large": 1.0}
    for name, gap in gaps.items():
        for turn in range(10):
            known.arrived(name, 5000.0 - gap * (9 - turn))
    adapters = [AdapterInfo(name, 8, 100 if name == "large" else 10) for name in gaps]
    now = 5000.5
    assert plan(known, adapters, {"here"}, 25, now) == ["often", "sometimes"]
    assert plan(known, adapters, {"here"}, 15, now) == ["often"]
    assert plan(known, adapters, {"here"}, 500, now) == ["large", "often", "sometimes"]
    assert plan(known, adapters, set(gaps), 500, now) == []
    with pytest.raises(InvalidInputError, match="horizon_s"):
        plan(known, adapters, set(), 5, now, horizon_s=0.0)
