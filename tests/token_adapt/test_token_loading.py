"""From the parameters of an image model to its batches: what bounds them, and what is logged."""

from __future__ import annotations

from typing import Any

import pytest

from shapeshift import settings
from shapeshift.engines import cuda_device, hardware
from shapeshift.errors import InvalidInputError
from shapeshift.token_adapt.front import costs_of, open_vision_model
from shapeshift.token_adapt.model import vision_model
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile
from shapeshift.token_adapt.settings import TokenAdaptSettings
from tests.fakes import PbUtils
from tests.token_adapt.token_models import RecordingModel, arguments, front


def costs(model: RecordingModel | None = None, device: int | None = None, **parameters: object) -> Costs:
    serving = settings.read(TokenAdaptSettings, arguments(**parameters).parameters)
    return costs_of(model or RecordingModel(), serving, device)


def sizes(memory_mb: int, batch_size: int = 64, each_mb: tuple[float, ...] = (20.0,)) -> int:
    """The largest batch of a model whose gammas, from 0, take so much memory for an image."""
    model = RecordingModel()
    model.profiles = {gamma: GammaProfile(gamma, 16, {1: 1.0, 64: 7.4}, mb) for gamma, mb in enumerate(each_mb)}
    model.gammas = tuple(model.profiles)
    return costs(model, memory_mb=memory_mb, batch_size=batch_size).max_size


@pytest.mark.parametrize(
    ("memory_mb", "most"), [(21, 1), (60, 2), (61, 3), (1270, 63), (1280, 63), (1281, 64), (10_000, 64)]
)
def test_a_batch_stays_below_the_memory(memory_mb: int, most: int) -> None:
    assert sizes(memory_mb) == most


@pytest.mark.parametrize("memory_mb", [10, 20])
def test_memory_for_less_than_an_image_is_refused(memory_mb: int) -> None:
    with pytest.raises(InvalidInputError, match=f"^memory_mb: got {memory_mb}.0; above 20, the memory of one image"):
        sizes(memory_mb)


def test_the_engine_of_the_least_memory_bounds_the_batch_and_none_without_memory() -> None:
    assert sizes(61, each_mb=(40.0, 20.0)) == 3
    assert sizes(61, each_mb=(0.0, 20.0)) == 64
    assert sizes(61, batch_size=2) == 2


def test_a_batch_is_as_large_as_the_throughput_asks_where_nobody_says() -> None:
    """1 ms of one image, 7.4 ms of 64, and a line between them; that of the gamma nearest to 0 counts."""
    rates = [count / (1.0 + (count - 1) * 6.4 / 63) for count in range(1, 65)]
    enough = next(count for count, rate in enumerate(rates, 1) if rate >= 0.9 * max(rates))
    assert 1 < enough < 64
    assert sizes(10_000, batch_size=0) == enough
    assert sizes(61, batch_size=0) == 3


def test_what_the_tasks_say_is_logged_and_then_what_is_served() -> None:
    model, pb_utils = RecordingModel(), PbUtils()
    model.messages = ["task a: refused", "task b: refused"]
    front(model, pb_utils, batch_size=8).close()
    log = [line.removeprefix("classify_image: ") for line in pb_utils.Logger.lines]
    assert log[:2] == ["task a: refused", "task b: refused"]
    assert log[2].startswith("ready: 2 tasks, gammas -4, 0, 2, batches of up to 8, algorithm ")


def test_a_gamma_that_the_model_lacks_is_refused() -> None:
    assert costs(use_gammas="0,2").gammas == (0, 2)
    with pytest.raises(InvalidInputError, match=r"^use_gammas: got 3; gammas of the model: -4, 0, 2"):
        costs(use_gammas="0,3")


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="^gamas: "):
        front(RecordingModel(), gamas="0")


@pytest.mark.parametrize(("device", "memory_mb", "most"), [(None, 0, 7), (None, 9, 8), (3, 0, 5), (3, 9, 8)], ids=str)
def test_memory_is_stated_or_what_is_free_where_batches_run(
    device: int | None, memory_mb: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "available_mb", lambda: 7.5)
    monkeypatch.setattr(cuda_device, "free_memory", lambda device: (1.75 * device, "free"))
    assert costs(device=device, memory_mb=memory_mb, batch_size=64).max_size == most


@pytest.mark.parametrize(("sha256", "expected"), [("", None), ("abc", "abc")])
def test_engines_are_opened_as_the_parameters_say(
    sha256: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(vision_model, "open_model", lambda *args: opened.append(args))
    args = arguments(threads=3, engines="e", manifest_sha256=sha256, tasks_dir="t")
    open_vision_model(args, settings.read(TokenAdaptSettings, args.parameters))
    engines, tasks, *others = opened[0]
    assert (engines.name, tasks.name, others) == ("e", "t", [3, expected, args.device])
