"""Which workers get rows: what each outcome of a call means, at known times, on a queue that all workers share."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from shapeshift.engines.execution.request import Row, TextRequest
from shapeshift.errors import EngineError, ModelDiedError, ModelGoneError
from shapeshift.polymorph.router import membership
from shapeshift.polymorph.router.assignment import SharedQueue
from shapeshift.polymorph.router.membership import DEAD_AFTER, FAILING_AFTER, Membership, WorkerCall, WorkerState
from shapeshift.polymorph.router.transport import OtherVersionError, WorkerInfo, WrongBinError
from shapeshift.serving.bounds import SloClasses
from shapeshift.serving.call_pool import CallTimeoutError
from tests.fakes import logger

LATE = CallTimeoutError("w", True)


class Site:
    """Two candidates, `a` and `b`, at a time that the test sets; a row costs its tokens in ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.log: list[str] = []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(membership, "time", clock)
        monkeypatch.setattr("shapeshift.polymorph.router.assignment.time", clock)
        shared = SharedQueue(lambda edge: (1, 1), lambda edge, tokens: float(tokens), SloClasses())
        self.members = Membership(shared, 100, logger(self.log))
        self.members.offer(["a", "b"])

    def worker(self, name: str = "a") -> WorkerState:
        return self.members.workers[name]

    def begin(self, name: str = "a", *rows: Row, expected_ms: float = 10.0) -> WorkerCall:
        worker = self.worker(name)
        made = WorkerCall(rows, expected_ms, worker.epoch, self.now)
        worker.calls.append(made)
        return made

    def ends(
        self, outcome: WorkerInfo | Exception | None, name: str = "a", texts: int = 0, after_s: float = 0.01
    ) -> None:
        """A call of so many texts, at most one, begins and ends."""
        self.members.put(rows(*[3] * texts))
        call = self.begin(name, *(self.members.take(self.worker(name)) if texts else ()))
        assert len(call.rows) == texts
        self.now += after_s
        self.members.ended(self.worker(name), call, outcome)

    def join(self, *names: str) -> None:
        for name in names:
            self.ends(info(), name)
        self.ready()

    def ready(self) -> list[str]:
        """The workers that may start a call, each once."""
        found = []
        while (worker := self.members.next_ready()) is not None:
            found.append(worker.name)
        return found


def info(edge: int = 0, pid: int = 7) -> WorkerInfo:
    return WorkerInfo(edge, 0, pid)


def rows(*lengths: int) -> list[Row]:
    return TextRequest([np.ones(length, np.int64) for length in lengths], lambda request: None).rows


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(monkeypatch)


def test_a_worker_joins_by_its_report_and_is_said_once(site: Site) -> None:
    assert site.members.joined == 0
    site.ends(info())
    worker = site.worker()
    assert (worker.joined, worker.epoch, worker.joined_at, site.members.joined) == (True, 1, 100.01, 1)
    site.ends(info())
    assert worker.epoch == 1 and site.log == ["a: joined, bin any, generation 0"]
    assert site.ready() == ["a"]


def test_a_bin_that_cannot_be_used_is_said_where_it_changes(site: Site) -> None:
    for edge in (64, 64, 32):
        site.ends(info(edge))
    assert not site.worker().joined
    assert site.log == [f"a: not used, its bin {edge} is not one of this model's" for edge in (64, 32)]


def test_a_worker_whose_bin_changes_leaves_and_joins(site: Site) -> None:
    site.join("a")
    site.ends(info(64))
    assert not site.worker().joined and site.worker().left_at == site.now
    assert site.log[1] == "a: left, it has bin 64 now"
    site.ends(info(0))
    assert site.worker().joined and site.worker().epoch == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModelGoneError("away"), "is not ready"),
        (ModelDiedError("dead"), "has died"),
        (WrongBinError("short"), "has another bin"),
        (OtherVersionError("old"), "is of another version"),
        (LATE, "did not answer in time"),
    ],
)
def test_each_of_these_makes_a_worker_leave_at_once(site: Site, error: Exception, reason: str) -> None:
    site.join("a")
    site.ends(error)
    assert not site.worker().joined and site.log[1] == f"a: left, it {reason}"


def test_a_worker_that_died_counts_as_dead_and_one_that_is_away_does_not(site: Site) -> None:
    site.ends(ModelGoneError("away"))
    assert site.worker().timeouts == 0
    site.ends(ModelDiedError("dead"))
    assert site.worker().timeouts == DEAD_AFTER


def test_a_worker_fails_some_calls_in_a_row_before_it_leaves_and_probes_do_not_count(site: Site) -> None:
    site.join("a")
    site.ends(EngineError("out of luck"))
    assert site.worker().failures == 0
    for count in range(1, FAILING_AFTER):
        site.ends(EngineError("out of luck"), texts=1)
        assert site.worker().joined and site.worker().failures == count
    site.ends(EngineError("out of luck"), texts=1)
    assert not site.worker().joined
    assert site.log[1] == f"a: left, it failed {FAILING_AFTER} times in a row: out of luck"


def test_calls_with_rows_that_are_late_count_and_probes_once_the_worker_is_away_for_long(site: Site) -> None:
    site.join("a")
    worker = site.worker()
    behind = site.begin("a", *rows(3))
    site.ends(LATE, texts=1)
    assert (worker.late, worker.timeouts, worker.joined) == (1, 1, False)
    # What waits behind that call, and a probe, say no more than the call.
    site.now += 0.25
    site.members.ended(worker, behind, LATE)
    site.ends(LATE, after_s=3.7)
    assert (worker.late, worker.timeouts) == (2, 1)
    site.ends(LATE, after_s=0.1)
    assert (worker.late, worker.timeouts) == (2, 2)


def test_the_longer_a_call_was_waited_for_the_later_a_worker_counts_as_dead(site: Site) -> None:
    site.join("a")
    worker = site.worker()
    site.ends(LATE, texts=1, after_s=6.0)
    site.ends(LATE, after_s=17.0)
    assert worker.timeouts == 1
    site.ends(LATE, after_s=2.0)
    assert worker.timeouts == 2


def test_an_answer_in_time_ends_the_row_of_late_calls_and_a_probe_does_not(site: Site) -> None:
    site.join("a")
    worker = site.worker()
    worker.late = 2
    site.ends(info())
    assert worker.late == 2
    site.ends(info(), texts=1)
    assert worker.late == 0


def test_a_late_answer_shows_that_the_worker_lives(site: Site) -> None:
    site.join("a")
    worker = site.worker()
    worker.timeouts, worker.failures = 3, 1
    site.members.answered(worker, WorkerCall((), 1.0, worker.epoch, site.now), 1.0)
    assert (worker.timeouts, worker.failures) == (0, 1)
    site.members.answered(worker, WorkerCall(tuple(rows(3)), 1.0, worker.epoch, site.now), 1.0)
    assert worker.failures == 0
    worker.timeouts = 3
    site.members.answered(worker, WorkerCall(tuple(rows(3)), 1.0, worker.epoch - 1, site.now), 1.0)
    assert worker.timeouts == 3, "the process that answered was replaced"


def test_late_answers_teach_how_slow_the_machine_is(site: Site) -> None:
    """Else every call of a machine that is much slower than its profile would be late."""
    site.join("a")
    worker = site.worker()
    assert site.members.slowness == pytest.approx(1.0)
    for _ in range(60):
        site.members.answered(worker, WorkerCall(tuple(rows(3)), 10.0, worker.epoch, site.now), 70.0)
    assert site.members.slowness == pytest.approx(7.0, rel=0.05)
    assert worker.time_limit_s(100.0, site.now, site.members.slowness) == pytest.approx(5 * 0.7, rel=0.05)


def test_a_call_of_an_earlier_epoch_changes_nothing_but_the_report(site: Site) -> None:
    site.join("a")
    worker = site.worker()
    call = site.begin("a")
    worker.epoch += 1
    site.members.ended(worker, call, ModelDiedError("dead"))
    assert worker.joined and worker.timeouts == 0


def test_contact_is_when_a_call_ended_unless_it_was_late(site: Site) -> None:
    site.ends(info())
    assert site.worker().last_contact == 100.01
    site.ends(LATE)
    assert (site.worker().last_contact, site.worker().last_end) == (100.01, site.now)


@pytest.mark.parametrize(("reported_s", "due"), [(0.4, False), (0.6, True)])
def test_a_worker_with_another_bin_is_asked_unless_it_has_just_said_it(
    site: Site, reported_s: float, due: bool
) -> None:
    site.join("a")
    site.ends(WrongBinError("short"), after_s=reported_s)
    assert site.worker().probe_due is due


def test_another_version_is_said_once_each(site: Site) -> None:
    for text in ("old", "old", "older"):
        site.ends(OtherVersionError(text))
    assert site.log == ["a: not used: old", "a: not used: older"] and site.worker().problem == "older"
    site.join("a")
    assert site.worker().problem == ""


def test_a_worker_that_is_no_longer_offered_leaves_and_others_stay(site: Site) -> None:
    site.join("a", "b")
    former, kept = site.worker("a"), site.worker("b")
    call = site.begin("a")
    site.members.probe(former)
    site.members.offer(["b", "c"])
    assert list(site.members.workers) == ["b", "c"] and site.worker("b") is kept
    assert not former.joined and "a: left, it is no longer offered" in site.log
    assert "a" not in site.ready()
    # Its call ends as it would have, and it does not come back.
    site.members.ended(former, call, info())
    assert not former.joined and former.calls == [] and "a" not in site.ready()


def test_the_same_offer_changes_nothing(site: Site) -> None:
    before = site.members.workers
    site.members.offer(["a", "b"])
    assert site.members.workers is before


def test_a_gauge_of_a_former_worker_is_0(site: Site) -> None:
    read = site.members.by_worker(lambda worker: 5.0)
    assert read() == {"a": 5.0, "b": 5.0}
    site.members.offer(["b"])
    assert read() == {"a": 0.0, "b": 5.0}


def test_rows_of_a_failed_call_are_retries_while_they_are_open(site: Site) -> None:
    first, second = rows(3), rows(4)
    second[0].done = True
    site.members.retry([*first, *second])
    assert site.members.retries == 1 and site.members.pending.rows == 1


def test_a_worker_that_has_not_joined_gets_no_rows(site: Site) -> None:
    site.members.put(rows(3))
    assert site.members.take(site.worker()) == []
    site.join("a")
    assert [row.tokens for row in site.members.take(site.worker())] == [3]


def test_rows_that_are_left_make_another_worker_ready(site: Site) -> None:
    site.join("a", "b")
    site.members.put(rows(3, 4))
    site.ready()
    assert [row.tokens for row in site.members.take(site.worker("a"))] == [3]
    assert site.ready() == ["b"]


def test_a_prediction_is_what_waits_and_the_own_rows_by_the_workers_there_are(site: Site) -> None:
    own = rows(6, 2)

    def predicted() -> float:
        return site.members.predicted_ms(own, lambda row: float(row.tokens))

    # No worker takes them: what waits before them is not known.
    assert predicted() == 8.0
    site.join("a")
    assert predicted() == pytest.approx(8.0 * site.members.measured.value)
    site.join("b")
    assert predicted() == pytest.approx(6.0 * site.members.measured.value)
