"""Adding or releasing one worker by the tail latency."""

from __future__ import annotations

from shapeshift.sidecar.observe import Traffic
from shapeshift.sidecar.policy.decide import decide_scaling, is_fast, tail_ms
from shapeshift.sidecar.policy.moves import Action
from tests.sidecar.fakes import front

FRONT = front(min_workers=1, max_workers=4)
CURRENT = {"enc_w00": 512, "enc_w01": 32, "enc_w02": 128}
ALIVE = set(CURRENT)
LIVE = frozenset({1})


def test_slow_answers_add_a_worker_with_the_longest_bin() -> None:
    action, reason = decide_scaling(FRONT, Traffic(10, p98_ms=285.0), 0, CURRENT, ["enc_w03"], ALIVE)
    assert action == Action("load", "enc_w03", 512)
    assert "p98 285.0 ms, objective 300 ms, 3 workers" in reason
    assert decide_scaling(FRONT, Traffic(10, p98_ms=284.0), 0, CURRENT, ["enc_w03"], ALIVE)[0] is None


def test_no_more_than_there_are_models() -> None:
    action, reason = decide_scaling(FRONT, Traffic(10, p98_ms=299.0), 0, CURRENT, [], ALIVE)
    assert action is None
    assert "shapeshift engines" in reason


def test_fast_answers_release_the_least_busy_worker() -> None:
    traffic = Traffic(10, p98_ms=100.0, outstanding={"enc_w00": 0, "enc_w01": 2, "enc_w02": 1})
    assert decide_scaling(FRONT, traffic, 59.0, CURRENT, [], ALIVE)[0] is None
    # enc_w00 is idle, but it is the only worker that takes the longest texts.
    assert decide_scaling(FRONT, traffic, 60.0, CURRENT, [], ALIVE)[0] == Action("unload", "enc_w02", before=128)
    two = CURRENT | {"enc_w03": 512}
    assert decide_scaling(FRONT, traffic, 60.0, two, [], set(two))[0] == Action("unload", "enc_w00", before=512)


def test_a_dead_worker_is_not_released() -> None:
    traffic = Traffic(10, p98_ms=1.0, outstanding={"enc_w01": 2, "enc_w02": 1})
    assert decide_scaling(FRONT, traffic, 60.0, CURRENT, [], {"enc_w01"})[0] == Action("unload", "enc_w01", before=32)
    action, reason = decide_scaling(FRONT, traffic, 60.0, CURRENT, [], set())
    assert action is None
    assert "none can be released" in reason


def test_an_idle_front_is_fast_and_a_stuck_front_is_unknown() -> None:
    assert tail_ms(Traffic(10, live_pids=LIVE)) == 0.0
    assert is_fast(FRONT, Traffic(10, live_pids=LIVE))
    for stuck in (
        Traffic(10, live_pids=LIVE, waiting=1),
        Traffic(10, live_pids=LIVE, outstanding={"enc_w00": 1}),
        Traffic(10),
    ):
        assert tail_ms(stuck) is None
        assert not is_fast(FRONT, stuck)
        action, reason = decide_scaling(FRONT, stuck, 1000.0, CURRENT, ["enc_w03"], ALIVE)
        assert action is None
        assert "unknown" in reason


def test_workers_with_all_bins() -> None:
    one = front(placement="resident", min_workers=1, max_workers=4)
    current = dict.fromkeys(CURRENT, 0)
    assert decide_scaling(one, Traffic(10, p98_ms=300.0), 0, current, ["enc_w03"], ALIVE)[0] == Action(
        "load", "enc_w03", 0
    )
    assert decide_scaling(one, Traffic(10, p98_ms=3.0), 99, current, [], ALIVE)[0] == Action(
        "unload", "enc_w00", before=0
    )
