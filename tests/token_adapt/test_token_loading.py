"""From the parameters of an image model to its batches: what bounds them, and what is logged."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt import loading
from shapeshift.token_adapt.interfaces import GammaProfile
from shapeshift.token_adapt.model import vision_model
from tests.token_adapt.token_models import RecordingModel, arguments


def load(model: RecordingModel | None = None, **parameters: object) -> tuple[loading.Loaded, list[str]]:
    log: list[str] = []
    found = model or RecordingModel()
    return loading.load(arguments(**parameters), log.append, lambda args, serving: found), log


def sizes(memory_mb: float, batch_share: float = 0.0, batch_size: int = 64, each_mb: tuple[float, ...] = (2.0,)) -> int:
    profiles = [GammaProfile(number, 16, {1: 1.0, 64: 7.4}, own) for number, own in enumerate(each_mb)]
    settings = load(batch_share=batch_share, batch_size=batch_size)[0].settings
    return loading._batch_size(profiles, settings, memory_mb)


@pytest.mark.parametrize(
    ("memory_mb", "most"), [(2.1, 1), (6.0, 2), (6.1, 3), (127.0, 63), (128.0, 63), (128.1, 64), (1000.0, 64)]
)
def test_a_batch_stays_below_the_memory(memory_mb: float, most: int) -> None:
    assert sizes(memory_mb) == most


@pytest.mark.parametrize("memory_mb", [1.0, 2.0])
def test_memory_for_less_than_an_image_is_refused(memory_mb: float) -> None:
    with pytest.raises(InvalidInputError, match=f"^memory_mb: got {memory_mb}; above 2, the memory of one image"):
        sizes(memory_mb)


def test_the_engine_of_the_least_memory_bounds_the_batch_and_none_without_memory() -> None:
    assert sizes(6.1, each_mb=(4.0, 2.0)) == 3
    assert sizes(6.1, each_mb=(0.0, 2.0)) == 64
    assert sizes(6.1, batch_size=2) == 2


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_with_a_share_a_batch_is_as_large_as_the_throughput_asks(share: float) -> None:
    """1 ms of one image, 7.4 ms of 64, and a line between them; that of the gamma nearest to 0 counts."""
    rates = [count / (1.0 + (count - 1) * 6.4 / 63) for count in range(1, 65)]
    wanted = next(count for count, rate in enumerate(rates, 1) if rate >= share * max(rates) - 1e-12)
    assert sizes(1000.0, share) == wanted
    assert sizes(1000.0, 0.0) == 64


def test_what_the_tasks_say_is_logged_and_then_what_is_served() -> None:
    model = RecordingModel()
    model.messages = ["task a: refused", "task b: refused"]
    found, log = load(model, batch_size=8, batch_share=0.0)
    assert log[:2] == ["task a: refused", "task b: refused"] and len(log) == 3
    assert log[2].startswith("ready: 2 tasks, gammas -4, 0, 2, batches of up to 8, algorithm ")
    assert found.model is model and found.settings.batch_size == 8


def test_a_gamma_that_the_model_lacks_is_refused() -> None:
    assert load(use_gammas="0,2")[0].costs.gammas == (0, 2)
    with pytest.raises(InvalidInputError, match=r"^use_gammas: got 3; gammas of the model: -4, 0, 2"):
        load(use_gammas="0,3")


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="^gamas: "):
        load(gamas="0")


@pytest.mark.parametrize(("memory_mb", "most"), [(0, 7), (9, 8)])
def test_memory_is_stated_or_what_is_free(memory_mb: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def available(device: int | None) -> float:
        asked.append(device)
        return 7.5

    monkeypatch.setattr(loading, "_available_mb", available)
    _, log = load(memory_mb=memory_mb, batch_share=0.0)
    assert f"batches of up to {most}," in log[-1]
    assert asked == ([] if memory_mb else [None])


@pytest.mark.parametrize(("sha256", "expected"), [("", None), ("abc", "abc")])
def test_engines_are_opened_as_the_parameters_say(
    sha256: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(vision_model, "open_model", lambda *args: opened.append(args))
    args = arguments(threads=3, engines="e", manifest_sha256=sha256, tasks_dir="t")
    serving = loading.settings.read(loading.TokenAdaptSettings, args.parameters)
    loading.open_model(args, serving)
    engines, tasks, *others = opened[0]
    assert (engines.name, tasks.name, others) == ("e", "t", [3, expected, args.device])
