"""One worker more or fewer."""

from __future__ import annotations

from shapeshift.scheduler.moves import Action
from shapeshift.scheduler.observe import Load
from shapeshift.scheduler.scale import is_below, scale, tail_ms
from tests.scheduler.fakes import front

FRONT = front(min_workers=1, max_workers=4)
HAVE = {"enc_w00": 512, "enc_w01": 32, "enc_w02": 128}
ALIVE = set(HAVE)
LIVE = frozenset({1})


def test_slow_answers_add_a_worker_with_the_longest_bin() -> None:
    action, reason = scale(FRONT, Load(10, p98_ms=285.0), 0, HAVE, ["enc_w03"], ALIVE)
    assert action == Action("load", "enc_w03", 512)
    assert "p98 285.0 ms, objective 300 ms, 3 workers" in reason
    assert scale(FRONT, Load(10, p98_ms=284.0), 0, HAVE, ["enc_w03"], ALIVE)[0] is None


def test_no_more_than_there_are_models() -> None:
    action, reason = scale(FRONT, Load(10, p98_ms=299.0), 0, HAVE, [], ALIVE)
    assert action is None
    assert "make engines" in reason


def test_fast_answers_release_the_least_busy_worker() -> None:
    load = Load(10, p98_ms=100.0, outstanding={"enc_w00": 0, "enc_w01": 2, "enc_w02": 1})
    assert scale(FRONT, load, 59.0, HAVE, [], ALIVE)[0] is None
    # enc_w00 is idle, but the only one that takes the longest texts.
    assert scale(FRONT, load, 60.0, HAVE, [], ALIVE)[0] == Action("unload", "enc_w02", before=128)
    two = HAVE | {"enc_w03": 512}
    assert scale(FRONT, load, 60.0, two, [], set(two))[0] == Action("unload", "enc_w00", before=512)


def test_a_dead_worker_is_not_released() -> None:
    load = Load(10, p98_ms=1.0, outstanding={"enc_w01": 2, "enc_w02": 1})
    assert scale(FRONT, load, 60.0, HAVE, [], {"enc_w01"})[0] == Action("unload", "enc_w01", before=32)
    action, reason = scale(FRONT, load, 60.0, HAVE, [], set())
    assert action is None
    assert "none can be spared" in reason


def test_a_front_at_rest_counts_as_fast_and_a_stuck_one_as_unknown() -> None:
    assert tail_ms(Load(10, live=LIVE)) == 0.0
    assert is_below(FRONT, Load(10, live=LIVE))
    for stuck in (Load(10, live=LIVE, waiting=1), Load(10, live=LIVE, outstanding={"enc_w00": 1}), Load(10)):
        assert tail_ms(stuck) is None
        assert not is_below(FRONT, stuck)
        action, reason = scale(FRONT, stuck, 1000.0, HAVE, ["enc_w03"], ALIVE)
        assert action is None
        assert "not known" in reason


def test_workers_with_all_bins() -> None:
    one = front(placement="resident", min_workers=1, max_workers=4)
    have = dict.fromkeys(HAVE, 0)
    assert scale(one, Load(10, p98_ms=300.0), 0, have, ["enc_w03"], ALIVE)[0] == Action("load", "enc_w03", 0)
    assert scale(one, Load(10, p98_ms=3.0), 99, have, [], ALIVE)[0] == Action("unload", "enc_w00", before=0)
