"""Which models are dead: scrape by scrape."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shapeshift.scheduler.health import Backoff, Health, Rules
from shapeshift.scheduler.sight import Fate
from tests.scheduler.test_scheduler_observe import recorded

Beats = dict[str, dict[int, float]]
FateOf = Callable[[int], Fate]


def all_are(fate: Fate) -> FateOf:
    return lambda pid: fate


ALIVE, GONE, UNSEEN, ENDED = map(all_are, (Fate.ALIVE, Fate.ABSENT, Fate.UNSEEN, Fate.ENDED))


def until_dead(health: Health, beats: Beats, fate_of: FateOf, most: int = 100) -> int | None:
    """How many scrapes of the same beats it takes until the model `a` is dead."""
    return next((scrape for scrape in range(1, most) if "a" in health.look(beats, {}, fate_of)), None)


def moved(health: Health) -> None:
    for beat in (4.0, 5.0):
        assert health.look({"a": {1: beat}}, {}, GONE) == {}


@pytest.mark.parametrize(
    ("fate_of", "scrapes"),
    [(ENDED, Rules().ended), (GONE, Rules().still), (UNSEEN, Rules().unseen), (ALIVE, Rules().hung)],
)
def test_still_for_so_many_scrapes(fate_of: FateOf, scrapes: int) -> None:
    health = Health()
    moved(health)
    # The scrape that showed the last movement is the first of them.
    assert until_dead(health, {"a": {1: 5.0}}, fate_of) == scrapes - 1
    assert until_dead(Health(), {"a": {1: 5.0}}, fate_of) == scrapes


def test_a_beating_heart_is_alive_whatever_else_is_on_the_page() -> None:
    health = Health()
    for beat in range(60):
        assert health.look({"a": {1: 5.0, 2: float(beat)}, "b": {3: float(beat)}}, {}, GONE) == {}


def test_a_beat_now_and_then_is_enough() -> None:
    health = Health()
    for scrape in range(60):
        assert health.look({"a": {1: float(scrape // 2)}}, {}, GONE) == {}


def test_one_that_was_seen_alive_decides_among_those_that_ended_long_ago() -> None:
    fates = {1: Fate.ABSENT, 2: Fate.ENDED, 3: Fate.UNSEEN, 4: Fate.ALIVE}
    for pids, scrapes in (((1, 2), Rules().ended), ((1, 2, 3), Rules().unseen), ((1, 2, 3, 4), Rules().hung)):
        assert until_dead(Health(), {"a": dict.fromkeys(pids, 5.0)}, fates.__getitem__) == scrapes


def test_nothing_is_concluded_while_it_is_loaded() -> None:
    health = Health()
    moved(health)
    for _ in range(50):
        assert health.look({"a": {1: 5.0}}, {}, GONE, loading={"a"}) == {}


def test_after_a_load_the_old_process_is_forgotten() -> None:
    health = Health()
    moved(health)
    health.look({"a": {1: 5.0}}, {}, GONE, loading={"a"})
    for _ in range(Rules().silent - 1):
        assert health.look({"a": {1: 5.0}}, {}, GONE) == {}
    assert health.look({"a": {1: 5.0, 2: 1.0}}, {}, GONE) == {}
    assert until_dead(health, {"a": {1: 5.0, 2: 1.0}}, GONE) == Rules().still - 1


def test_a_load_that_brings_no_heart_is_tried_again() -> None:
    health = Health()
    moved(health)
    health.look({"a": {1: 5.0}}, {}, GONE, loading={"a"})
    assert until_dead(health, {"a": {1: 5.0}}, GONE) == Rules().silent


def test_a_load_that_failed_leaves_the_old_process_watched() -> None:
    health = Health()
    moved(health)
    health.look({"a": {1: 6.0}}, {}, GONE, loading={"a"})
    health.look({"a": {1: 7.0}}, {}, GONE)
    assert until_dead(health, {"a": {1: 7.0}}, GONE) == Rules().still - 1


def test_a_model_that_should_beat_and_never_does() -> None:
    health = Health()
    looks = [health.look({"b": {9: float(scrape)}}, {}, GONE, expected={"a", "b"}) for scrape in range(20)]
    assert [sorted(found) for found in looks].index(["a"]) == Rules().silent - 1


def test_time_outs_in_a_row() -> None:
    health = Health()
    beats = {"a": {1: 0.0}}
    assert health.look(beats, {"a": 0}, ALIVE) == {}
    assert health.look(beats, {"a": 1}, ALIVE) == {}
    found = health.look(beats, {"a": 2}, ALIVE)
    assert not found["a"].certain


def test_time_outs_from_before_a_load_count_no_more() -> None:
    health = Health()
    assert "a" in health.look({"a": {1: 0.0}}, {"a": 2}, ALIVE)
    health.look({"a": {1: 0.0}}, {"a": 2}, ALIVE, loading={"a"})
    for beat in range(20):
        # The front exports the last of them only after the load.
        assert health.look({"a": {2: float(beat)}}, {"a": 3}, ALIVE) == {}
    assert "a" in health.look({"a": {2: 30.0}}, {"a": 4}, ALIVE)


def test_time_outs_count_anew_after_an_answer() -> None:
    health = Health()
    health.look({"a": {1: 0.0}}, {"a": 2}, ALIVE, loading={"a"})
    for beat in range(5):
        health.look({"a": {2: float(beat)}}, {"a": 2}, ALIVE)
    assert health.look({"a": {2: 8.0}}, {"a": 0}, ALIVE) == {}
    assert "a" in health.look({"a": {2: 9.0}}, {"a": 2}, ALIVE)


def test_a_recorded_death() -> None:
    """enc_w01 is killed right after second 3 and loaded again after second 7."""
    health = Health()
    beats = [recorded(second).heartbeats() for second in range(12)]
    (victim,) = beats[3]["enc_w01"]
    found = [
        sorted(
            health.look(
                beats[second],
                {},
                lambda pid: Fate.ABSENT if pid == victim else Fate.ALIVE,
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
    backoff = Backoff(first_s=2.0, most_s=30.0, well_s=10.0)
    now, waits = 100.0, []
    assert backoff.wait_s("a", now) == 0
    for _ in range(7):
        backoff.note("a", now)
        waits.append(backoff.wait_s("a", now))
        now += waits[-1]
        assert backoff.wait_s("a", now) == 0
    assert waits == [2, 4, 8, 16, 30, 30, 30]
    assert backoff.wait_s("b", now) == 0


def test_backoff_forgets_a_model_that_was_well() -> None:
    backoff = Backoff(first_s=2.0, most_s=30.0, well_s=10.0)
    backoff.note("a", 0.0)
    backoff.note("a", 11.0)
    assert backoff.wait_s("a", 11.0) == 2.0
