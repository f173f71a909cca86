"""Evictions, small batches of urgent images, and the next batch."""

from __future__ import annotations

import time

import numpy as np
import pytest

from shapeshift.serving.bounds import OVERTAKEN
from shapeshift.token_adapt.policy.costs import Costs, GammaProfile
from shapeshift.token_adapt.policy.image_scheduler import ALGORITHMS, ImageScheduler, SchedulerSettings, WaitingImage
from tests.token_adapt.token_models import PROFILES, profile

GAMMAS = (-4, 0, 2)
ACCURACY = np.array([0.6, 0.8, 0.9])
WITHOUT_PROMPTS = np.array([0.6, 0.8, np.nan])


def scheduler(algorithm: str = "grid", size: int = 64, started: float = -1e9, **settings: object) -> ImageScheduler:
    defaults: dict[str, object] = {"price_window_ms": 0.0, "margin_ms": 0.0}
    made = SchedulerSettings(algorithm=algorithm, **{**defaults, **settings})  # type: ignore[arg-type]
    return ImageScheduler(Costs(PROFILES, GAMMAS, size), made, started)


def image(
    arrived: float,
    latency: float,
    utility: float = 1.0,
    accuracy: np.ndarray = ACCURACY,
    slo_class: str | None = None,
) -> WaitingImage:
    return WaitingImage(arrived, arrived + latency, utility, accuracy, slo_class=slo_class)


def test_the_most_accurate_gamma_runs_if_there_is_time() -> None:
    made = scheduler()
    made.add(image(0.0, 500.0))
    step = made.step(1.0)
    assert (len(step.images), GAMMAS[step.gamma], step.evicted) == (1, 2, [])
    assert len(made) == 0
    assert made.step(2.0).images == ()


def test_a_faster_gamma_runs_with_less_time_and_without_time_the_image_is_evicted() -> None:
    for left, gamma in ((1.6, 2), (1.4, 0), (0.9, -4)):
        made = scheduler()
        made.add(image(0.0, 100.0))
        step = made.step(100.0 - left)
        assert GAMMAS[step.gamma] == gamma
    made = scheduler()
    late, gone = image(0.0, 100.0), image(0.0, 60.0)
    made.add(late)
    made.add(gone)
    step = made.step(99.6)
    assert step.images == () and set(step.evicted) == {late, gone}
    assert len(made) == 0


def test_a_margin_moves_deadlines_forward() -> None:
    made = scheduler(margin_ms=50.0)
    made.add(image(0.0, 100.0))
    assert GAMMAS[made.step(49.2).gamma] == -4
    made.add(image(0.0, 100.0))
    assert len(made.step(49.6).evicted) == 1


def test_urgent_images_leave_a_batch_that_is_too_large() -> None:
    made = scheduler()
    patient = [image(0.0, 90.0) for _ in range(60)]
    urgent = [image(0.0, 84.0) for _ in range(3)]
    for one in (*patient, *urgent):
        made.add(one)
    # 63 images take at least 3.65 ms, three images 0.6 ms.
    step = made.step(82.0)
    assert set(step.images) == set(urgent) and step.evicted == []
    assert len(made) == 60


def test_urgent_images_share_the_largest_batch_that_meets_their_deadline() -> None:
    made = scheduler()
    crowd = [image(0.0, 100.0) for _ in range(40)]
    for one in crowd:
        made.add(one)
    step = made.step(98.6)
    assert 0 < len(step.images) < 40
    assert 98.6 + made.costs.min_time(len(step.images)) < 100.0 <= 98.6 + made.costs.min_time(len(step.images) + 1)
    assert GAMMAS[step.gamma] == -4
    assert len(made) + len(step.images) == 40


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_image_runs_once_at_a_gamma_of_its_task_or_is_evicted(algorithm: str) -> None:
    rng = np.random.default_rng(5)
    made = scheduler(algorithm, size=8, started=-1980.0)
    asked = [
        image(at, float(rng.uniform(1, 12)), float(rng.uniform(0, 1)), (ACCURACY, WITHOUT_PROMPTS)[number % 2])
        for number, at in enumerate(np.sort(rng.uniform(0, 60, 300)))
    ]
    clock, arrived, ended = 0.0, 0, []
    while arrived < len(asked) or len(made):
        clock = max(clock, asked[arrived].arrival) if not len(made) and arrived < len(asked) else clock
        while arrived < len(asked) and asked[arrived].arrival <= clock:
            made.add(asked[arrived])
            arrived += 1
        step = made.step(clock)
        ended += [*step.images, *step.evicted]
        assert step.images or not len(made), "images wait and nothing runs"
        if step.images:
            assert len(step.images) <= 8
            assert not any(np.isnan(one.accuracy[step.gamma]) for one in step.images)
            clock += float(made.costs.times([len(step.images)])[0, step.gamma])
            assert all(clock < one.deadline for one in step.images)
    assert len(ended) == len(set(ended)) == len(asked)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_the_planned_gamma_the_nearest_one_runs(algorithm: str) -> None:
    """Under no load all plan the greatest gamma, for images worth more than kappa."""
    made = scheduler(algorithm, started=0.0)
    made.add(image(0.0, 500.0, accuracy=WITHOUT_PROMPTS))
    made.add(image(0.0, 500.0))
    assert sorted(GAMMAS[made.step(1.0).gamma] for _ in range(2)) == [0, 2] and not len(made)


def test_an_image_without_the_fastest_gamma_is_evicted_by_the_time_of_its_own() -> None:
    """1 ms at 0 and half of it at -4."""
    made = scheduler()
    plain, slow = image(0.0, 100.0), image(0.0, 100.0, accuracy=np.array([np.nan, 0.8, 0.9]))
    made.add(plain)
    made.add(slow)
    step = made.step(99.3)
    assert step.images == [plain] and step.evicted == [slow]


def test_images_of_utility_0_run_if_nothing_else_waits() -> None:
    made = scheduler()
    made.add(image(0.0, 100.0, utility=0.0))
    assert len(made.step(0.0).images) == 1


def test_the_batch_of_higher_utility_runs_if_one_must_miss_its_deadline() -> None:
    made = scheduler()
    cheap, dear = image(0.0, 1.6, 0.1), image(0.0, 1.7, 1.0)
    made.add(cheap)
    made.add(dear)
    # Their utilities differ by more than mu, and only the fastest gamma could serve both in time.
    first = made.step(0.9)
    assert first.images == [dear]


def test_memory_excludes_gammas() -> None:
    profiles = {-4: profile(-4), 2: GammaProfile(2, 18, {1: 1.0}, 3.0)}
    for memory_mb, gamma in ((3.5, 2), (3.0, -4)):
        made: ImageScheduler[WaitingImage] = ImageScheduler(
            Costs(profiles, (-4, 2), 64, memory_mb), SchedulerSettings(), 0.0
        )
        made.add(WaitingImage(0.0, 500.0, 1.0, np.array([0.5, 0.9])))
        assert made.costs.gammas[made.step(0.0).gamma] == gamma


def test_the_papers_scheme_uses_the_rate_at_first_and_when_few_batches_wait() -> None:
    made = scheduler("paper", started=0.0)
    made.add(image(0.0, 500.0, utility=0.9))
    assert GAMMAS[made.step(10.0).gamma] == 2, "worth more than kappa: the greatest gamma"
    quiet = scheduler("by_rate")
    quiet.add(image(0.0, 500.0, utility=0.5))
    assert GAMMAS[quiet.step(0.0).gamma] == 2
    busy = scheduler("by_rate")
    crowd = image(0.0, 500.0, utility=0.5)
    for _ in range(60_000):
        busy.add(crowd)
    busy.remove(lambda one: True)
    busy.add(image(0.0, 500.0, utility=0.5))
    assert GAMMAS[busy.step(0.0).gamma] == -4


def test_images_can_be_removed() -> None:
    made = scheduler()
    kept, gone = image(0.0, 100.0), image(0.0, 100.0)
    made.add(kept)
    made.add(gone)
    assert made.remove(lambda one: one is gone) == [gone]
    assert made.remove(lambda one: one is gone) == []
    assert made.step(0.0).images == [kept]


def test_planning_is_timed_in_milliseconds() -> None:
    made = scheduler()
    for at in (0.0, 1.0):
        made.add(image(at, 500.0))
        began = time.perf_counter()
        step = made.step(at)
        took_ms = (time.perf_counter() - began) * 1e3
    assert took_ms / 100 < step.plan_ms <= took_ms


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_urgent_images_run_before_a_burst_that_came_before(algorithm: str) -> None:
    made = scheduler(algorithm, size=4)
    burst = [image(0.0, 1000.0, slo_class="batch") for _ in range(12)]
    urgent = [image(1.0, 1000.0, slo_class="interactive") for _ in range(5)]
    for one in (*burst, *urgent):
        made.add(one)
    steps = [made.step(2.0 + number).images for number in range(5)]
    assert [one for images in steps for one in images] == [*urgent, *burst]
    assert made.classes.started == [5, 0, 12] and made.classes.waiting == [0, 0, 0]
    assert made.classes.overtakes == 5 and made.classes.overtaken == [0, 0, 5]
    assert made.classes.waited_s[0] / 5 < made.classes.waited_s[2] / 12


def test_an_image_is_overtaken_so_often_and_no_more() -> None:
    made = scheduler(size=1)
    patient = image(0.0, 1e6, slo_class="batch")
    made.add(patient)
    for number in range(2 * OVERTAKEN):
        made.add(image(1.0 + number, 1e5, slo_class="interactive"))
        if patient in made.step(2.0 + number).images:
            break
    assert number == OVERTAKEN == patient.overtaken
    assert len(made) == 1


def test_an_urgent_image_that_is_late_is_evicted_as_any_other() -> None:
    made = scheduler()
    late, patient = image(0.0, 60.0, slo_class="interactive"), image(0.0, 500.0, slo_class="batch")
    for one in (late, patient):
        made.add(one)
    step = made.step(99.6)
    assert step.evicted == [late] and list(step.images) == [patient]
    assert made.classes.waiting == [0, 0, 0]
