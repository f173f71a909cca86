"""Dead models from heartbeats and timeouts, and the backoff of reloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest

from shapeshift.sidecar.health import DeadModel, HealthLimits, HealthTracker, ReloadBackoff
from shapeshift.sidecar.observe import StalledThread
from shapeshift.triton.embedded.process_tracker import ProcessState
from tests.sidecar.test_sidecar_observe import recorded

Beats = dict[str, dict[int, float]]
StateOf = Callable[[int], ProcessState]


def all_are(state: ProcessState) -> StateOf:
    return lambda pid: state


ALIVE, ABSENT, UNKNOWN, ENDED = map(
    all_are, (ProcessState.ALIVE, ProcessState.ABSENT, ProcessState.UNKNOWN, ProcessState.ENDED)
)
SUSPENDED = all_are(ProcessState.SUSPENDED)


def until_dead(health: HealthTracker, beats: Beats, state_of: StateOf, most: int = 100) -> int | None:
    """How many scrapes with the same heartbeats it takes until the model `a` is dead."""
    return next((scrape for scrape in range(1, most) if "a" in health.update(beats, {}, state_of)), None)


def moved(health: HealthTracker) -> None:
    for beat in (4.0, 5.0):
        assert health.update({"a": {1: beat}}, {}, ABSENT) == {}


@pytest.mark.parametrize(
    ("state_of", "scrapes"),
    [
        (ENDED, HealthLimits().ended),
        (ABSENT, HealthLimits().absent),
        (SUSPENDED, HealthLimits().suspended),
        (UNKNOWN, HealthLimits().unknown),
        (ALIVE, HealthLimits().hung),
    ],
)
def test_a_stopped_heartbeat_is_dead_after_its_limit(state_of: StateOf, scrapes: int) -> None:
    health = HealthTracker()
    moved(health)
    # The scrape that showed the last movement is the first of them.
    assert until_dead(health, {"a": {1: 5.0}}, state_of) == scrapes - 1
    assert until_dead(HealthTracker(), {"a": {1: 5.0}}, state_of) == scrapes


def test_one_moving_heartbeat_is_enough() -> None:
    health = HealthTracker()
    for beat in range(60):
        assert health.update({"a": {1: 5.0, 2: float(beat)}, "b": {3: float(beat)}}, {}, ABSENT) == {}


def test_an_occasional_heartbeat_is_enough() -> None:
    health = HealthTracker()
    for scrape in range(60):
        assert health.update({"a": {1: float(scrape // 2)}}, {}, ABSENT) == {}


def test_the_limit_follows_the_process_that_may_still_live() -> None:
    states = {1: ProcessState.ABSENT, 2: ProcessState.ENDED, 3: ProcessState.UNKNOWN, 4: ProcessState.ALIVE}
    for pids, scrapes in (
        ((1, 2), HealthLimits().ended),
        ((1, 2, 3), HealthLimits().unknown),
        ((1, 2, 3, 4), HealthLimits().hung),
    ):
        assert until_dead(HealthTracker(), {"a": dict.fromkeys(pids, 5.0)}, states.__getitem__) == scrapes


def test_only_suspended_processes_are_to_be_killed() -> None:
    states = {1: ProcessState.SUSPENDED, 2: ProcessState.ABSENT, 3: ProcessState.ALIVE}
    for pids, suspended, scrapes in (((1, 2), (1,), 3), ((1, 2, 3), (), HealthLimits().hung)):
        health, beats = HealthTracker(), {"a": dict.fromkeys(pids, 5.0)}
        found = [health.update(beats, {}, states.__getitem__) for _ in range(scrapes)]
        assert found[:-1] == [{}] * (scrapes - 1)
        assert found[-1]["a"].suspended == suspended and found[-1]["a"].certain is bool(suspended)
        assert ("is suspended" in found[-1]["a"].reason) is bool(suspended)


def test_a_loading_model_is_never_dead() -> None:
    health = HealthTracker()
    moved(health)
    for _ in range(50):
        assert health.update({"a": {1: 5.0}}, {}, ABSENT, loading={"a"}) == {}


def test_after_a_load_the_old_process_is_forgotten() -> None:
    health = HealthTracker()
    moved(health)
    health.update({"a": {1: 5.0}}, {}, ABSENT, loading={"a"})
    for _ in range(HealthLimits().silent - 1):
        assert health.update({"a": {1: 5.0}}, {}, ABSENT) == {}
    assert health.update({"a": {1: 5.0, 2: 1.0}}, {}, ABSENT) == {}
    assert until_dead(health, {"a": {1: 5.0, 2: 1.0}}, ABSENT) == HealthLimits().absent - 1


def test_a_load_without_a_new_heartbeat_is_dead() -> None:
    health = HealthTracker()
    moved(health)
    health.update({"a": {1: 5.0}}, {}, ABSENT, loading={"a"})
    assert until_dead(health, {"a": {1: 5.0}}, ABSENT) == HealthLimits().silent


def test_after_a_failed_load_the_old_process_is_watched() -> None:
    health = HealthTracker()
    moved(health)
    health.update({"a": {1: 6.0}}, {}, ABSENT, loading={"a"})
    health.update({"a": {1: 7.0}}, {}, ABSENT)
    assert until_dead(health, {"a": {1: 7.0}}, ABSENT) == HealthLimits().absent - 1


def test_an_expected_model_without_a_heartbeat_is_dead() -> None:
    health = HealthTracker()
    dead = [health.update({"b": {9: float(scrape)}}, {}, ABSENT, expected={"a", "b"}) for scrape in range(20)]
    first = [sorted(found) for found in dead].index(["a"])
    assert first == HealthLimits().silent - 1
    assert dead[first]["a"].certain, "no process is there that could be slow"


def test_a_model_without_a_process_of_its_own_is_not_missed() -> None:
    """A worker that Triton's own backend serves has no heartbeat; its front counts what it does not answer."""
    health = HealthTracker()
    for scrape in range(3 * HealthLimits().silent):
        assert health.update({"front": {1: float(scrape)}}, {"a": 0}, ALIVE, expected={"front"}) == {}
    health.update({"front": {1: 100.0}}, {"a": 1}, ALIVE, expected={"front"})
    assert "a" in health.update({"front": {1: 101.0}}, {"a": 2}, ALIVE, expected={"front"})


def test_timeouts_in_a_row() -> None:
    health = HealthTracker()
    beats = {"a": {1: 0.0}}
    assert health.update(beats, {"a": 0}, ALIVE) == {}
    assert health.update(beats, {"a": 1}, ALIVE) == {}
    found = health.update(beats, {"a": 2}, ALIVE)
    assert not found["a"].certain


def test_timeouts_from_before_a_load_do_not_count() -> None:
    health = HealthTracker()
    assert "a" in health.update({"a": {1: 0.0}}, {"a": 2}, ALIVE)
    health.update({"a": {1: 0.0}}, {"a": 2}, ALIVE, loading={"a"})
    for beat in range(20):
        # The front exports the last timeout only after the load.
        assert health.update({"a": {2: float(beat)}}, {"a": 3}, ALIVE) == {}
    assert "a" in health.update({"a": {2: 30.0}}, {"a": 4}, ALIVE)


def test_timeouts_count_from_zero_after_an_answer() -> None:
    health = HealthTracker()
    health.update({"a": {1: 0.0}}, {"a": 2}, ALIVE, loading={"a"})
    for beat in range(5):
        health.update({"a": {2: float(beat)}}, {"a": 2}, ALIVE)
    assert health.update({"a": {2: 8.0}}, {"a": 0}, ALIVE) == {}
    assert "a" in health.update({"a": {2: 9.0}}, {"a": 2}, ALIVE)


STUCK, OTHER = StalledThread(1, "engine-0"), StalledThread(1, "responses")


class Stalls:
    """Scrapes of a model whose process 1 beats, and of its stalled threads."""

    def __init__(self) -> None:
        self.health = HealthTracker()
        self.beat = 0.0

    def scrape(self, seconds: Mapping[StalledThread, float], loading: Collection[str] = ()) -> DeadModel | None:
        self.beat += 1
        beats = {"a": {1: self.beat}}
        return self.health.update(beats, {}, ALIVE, loading, stalled={"a": seconds}).get("a")


def test_a_stalled_thread_is_dead_when_its_time_grows() -> None:
    stalls = Stalls()
    assert stalls.scrape({}) is None
    assert stalls.scrape({STUCK: 6.0}) is None
    assert stalls.scrape({STUCK: 6.0}) is None
    found = stalls.scrape({STUCK: 7.0, OTHER: 6.0})
    assert found == DeadModel("thread engine-0 of process 1 has work and has done no step for 7 s", False, (1,))


def test_a_thread_that_was_within_its_limit_is_dead_in_the_first_scrape_that_shows_it_stalled() -> None:
    stalls = Stalls()
    assert stalls.scrape({STUCK: 0.0}) is None
    assert stalls.scrape({STUCK: 0.0}) is None
    found = stalls.scrape({STUCK: 5.2})
    assert found is not None and found.hung == (1,)


def test_the_series_of_an_ended_process_kill_nothing() -> None:
    stalls = Stalls()
    for _ in range(50):
        assert stalls.scrape({STUCK: 6.0}) is None


def test_threads_that_stalled_before_a_load_do_not_count() -> None:
    stalls = Stalls()
    stalls.scrape({STUCK: 6.0})
    assert stalls.scrape({STUCK: 7.0}) is not None
    stalls.scrape({STUCK: 8.0}, loading={"a"})
    # The old process flushes its metrics once more while it ends.
    assert stalls.scrape({STUCK: 9.0}) is None
    for _ in range(20):
        assert stalls.scrape({STUCK: 9.0}) is None
    new = StalledThread(2, "engine-0")
    assert stalls.scrape({STUCK: 9.0, new: 0.0}) is None
    found = stalls.scrape({STUCK: 9.0, new: 6.0})
    assert found is not None and found.hung == (2,)


def test_a_recorded_death() -> None:
    """enc_w01 is killed right after second 3 and reloaded after second 7."""
    health = HealthTracker()
    beats = [recorded(second).heartbeats() for second in range(12)]
    (victim,) = beats[3]["enc_w01"]
    found = [
        sorted(
            health.update(
                beats[second],
                {},
                lambda pid: ProcessState.ABSENT if pid == victim else ProcessState.ALIVE,
                loading={"enc_w01"} if second == 8 else (),
            )
        )
        for second in range(12)
    ]
    dead_at = found.index(["enc_w01"])
    assert 4 < dead_at <= 6
    assert [names for names in found[:dead_at] if names] == []
    assert found[9:] == [[], [], []]


def test_backoff_grows_while_loads_do_not_help() -> None:
    backoff = ReloadBackoff(first_s=2.0, max_s=30.0, healthy_s=10.0)
    now, waits = 100.0, []
    assert backoff.wait_s("a", now) == 0
    for _ in range(7):
        backoff.record("a", now)
        waits.append(backoff.wait_s("a", now))
        now += waits[-1]
        assert backoff.wait_s("a", now) == 0
    assert waits == [2, 4, 8, 16, 30, 30, 30]
    assert backoff.wait_s("b", now) == 0


def test_backoff_forgets_a_model_that_was_healthy() -> None:
    backoff = ReloadBackoff(first_s=2.0, max_s=30.0, healthy_s=10.0)
    backoff.record("a", 0.0)
    backoff.record("a", 11.0)
    assert backoff.wait_s("a", 11.0) == 2.0
