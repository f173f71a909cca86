"""The health loop with a fake server and hand-made metrics pages."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.health import ReloadBackoff
from shapeshift.sidecar.health_loop import HealthLoop
from shapeshift.sidecar.journal import Journal
from shapeshift.triton import metrics
from shapeshift.triton.embedded.process_tracker import ProcessTracker
from shapeshift.triton.metrics import Samples
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer, samples
from tests.sidecar.fleet import single
from tests.sidecar.stubs import Stubs
from tests.waiting import wait_for

PAGES = Path(__file__).parent / "pages"
# No process has this pid.
NO_PID = 4_194_304


class Case:
    """A health loop over a loaded front and two workers; `pids`, `dead` and `timeouts` define its scrapes."""

    def __init__(self, slow_reload_s: float = 10.0) -> None:
        self.server = FakeServer()
        self.server.add_front()
        for worker in ("enc_w00", "enc_w01"):
            self.server.load(worker)
        self.server.calls.clear()
        self.pids = {"enc": NO_PID, "enc_w00": NO_PID + 1, "enc_w01": NO_PID + 2}
        self.dead: set[str] = set()
        self.timeouts: dict[str, float] = {}
        self.stalled: dict[str, dict[str, float]] = {}
        self.beats = 0.0
        self.stopped: dict[str, float] = {}
        self.down = False
        self.log: list[str] = []
        self.blocked = ""
        journal = Journal(logger(self.log), lambda values: None, {})
        fleet = single(self.server, self.scrape)
        self.actuator = Actuator(fleet.control, (), journal, lambda: self.blocked)
        tracker = ProcessTracker(local=True)
        self.loop = HealthLoop(fleet.scrape, fleet.control, self.actuator, journal, tracker, slow_reload_s)

    def scrape(self) -> Samples:
        if self.down:
            raise ShapeshiftError("no metrics; is the server running?")
        self.beats += 1
        found: Samples = {}
        for model, pid in self.pids.items():
            beats = self.stopped.setdefault(model, self.beats) if model in self.dead else self.beats
            more = {"timeouts": self.timeouts} if model == "enc" else {}
            found |= samples(model, pid, beats, stalled=self.stalled.get(model, {}), **more)
        return found

    def scrapes(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()

    def settle(self) -> None:
        """Wait for the started loads."""
        wait_for(lambda: not self.loop.pending)

    def logged(self, text: str) -> int:
        return sum(text in line for line in self.log)


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_dead_worker_is_reloaded(case: Case) -> None:
    case.scrapes(5)
    case.dead = {"enc_w01"}
    # The first scrape still shows a movement; it and the next two are the three with equal heartbeats.
    case.scrapes(2)
    case.settle()
    assert case.server.calls == []
    case.scrapes(1)
    case.settle()
    assert case.server.calls == [("load", "enc_w01", "512")]
    assert case.server.parameter("enc_w01", "generation") == "1"
    assert case.logged("process 4194306 has ended and its heartbeat has stopped: reloading") == 1


def test_front_and_workers_that_die_together_are_reloaded(case: Case) -> None:
    case.scrapes(5)
    case.dead = {"enc", "enc_w00", "enc_w01"}
    case.scrapes(3)
    case.settle()
    assert sorted(name for kind, name, _ in case.server.calls if kind == "load") == ["enc", "enc_w00", "enc_w01"]


def test_a_dead_front_is_unloaded_before_it_is_loaded_again(case: Case) -> None:
    """Until it is loaded, the server would give its dead process requests, which nobody answers."""
    case.scrapes(5)
    case.dead = {"enc"}
    case.scrapes(3)
    case.settle()
    assert case.server.calls == [("unload", "enc", ""), ("load", "enc", "")]
    assert case.server.parameter("enc", "generation") == "1"
    assert case.actuator.owed.names() == frozenset()


def test_a_front_whose_load_fails_is_loaded_as_soon_as_it_can_be(case: Case) -> None:
    case.server.loaded["enc"]["parameters"]["slo_ms"]["string_value"] = "77"
    case.server.fails = lambda name, bin_: "no memory"
    case.scrapes(5)
    case.dead = {"enc"}
    case.scrapes(3)
    case.settle()
    assert "enc" not in case.server.loaded
    # It has no metrics while it is not loaded.
    del case.pids["enc"]
    case.server.fails = lambda name, bin_: None
    case.actuator.backoff = ReloadBackoff()
    case.scrapes(1)
    case.settle()
    assert case.server.parameter("enc", "slo_ms") == "77", "as it was loaded, not as its file says"
    assert [kind for kind, _, _ in case.server.calls] == ["unload", "load", "load"]
    case.scrapes(5)
    case.settle()
    assert len(case.server.calls) == 3


def test_what_the_server_has_loaded_by_itself_is_not_loaded_again(case: Case) -> None:
    case.actuator.owed.add("enc", case.server.config("enc"))
    case.scrapes(5)
    case.settle()
    assert case.server.calls == []
    assert case.actuator.owed.names() == frozenset()


def test_a_hanging_load_does_not_delay_another(case: Case) -> None:
    go_on = threading.Event()

    def slowly(name: str, bin_: str) -> None:
        assert name != "enc_w00" or go_on.wait(120)

    case.server.fails = slowly
    case.scrapes(5)
    case.dead = {"enc_w00"}
    case.scrapes(4)
    case.dead = {"enc_w00", "enc_w01"}
    expect_healed_beside_a_hanging_reload(case, go_on)


def expect_healed_beside_a_hanging_reload(case: Case, go_on: threading.Event) -> None:
    """enc_w01 is loaded again while the reload of enc_w00 hangs, until `go_on`."""
    deadline = time.monotonic() + 120
    while ("load", "enc_w01", "512") not in case.server.calls:
        assert time.monotonic() < deadline
        case.scrapes(1)
        time.sleep(0.005)
    assert "enc_w00" in case.actuator.changing
    go_on.set()
    case.settle()


def test_an_unloaded_model_is_not_reloaded(case: Case) -> None:
    case.scrapes(5)
    case.dead = {"enc_w01"}
    case.server.unload("enc_w01")
    case.server.calls.clear()
    case.scrapes(50)
    case.settle()
    assert case.server.calls == []


def test_an_unloaded_model_holds_up_no_other(case: Case) -> None:
    case.scrapes(5)
    case.server.unload("enc_w00")
    case.server.calls.clear()
    case.dead = {"enc_w00", "enc_w01"}
    case.scrapes(3)
    case.settle()
    assert case.server.calls == [("load", "enc_w01", "512")]


def test_workers_that_time_out_are_reloaded_one_at_a_time(case: Case) -> None:
    go_on = threading.Event()

    def slowly(name: str, bin_: str) -> None:
        assert go_on.wait(120)

    case.server.fails = slowly
    case.scrapes(5)
    case.timeouts = {"enc_w00": 2, "enc_w01": 3}
    case.scrapes(5)
    assert len(case.loop.pending) == 1
    go_on.set()
    case.settle()
    case.scrapes(1)
    case.settle()
    assert sorted(name for _, name, _ in case.server.calls) == ["enc_w00", "enc_w01"]
    # The front has sent them no request since, so the same numbers prove nothing.
    case.scrapes(50)
    case.settle()
    assert len(case.server.calls) == 2


def test_a_reload_that_hangs_does_not_keep_another_slow_model_from_being_reloaded() -> None:
    case, go_on = Case(slow_reload_s=0.05), threading.Event()

    def slowly(name: str, bin_: str) -> None:
        assert name != "enc_w00" or go_on.wait(120)

    case.server.fails = slowly
    case.scrapes(5)
    case.timeouts = {"enc_w00": 2}
    case.scrapes(1)
    case.timeouts = {"enc_w00": 2, "enc_w01": 2}
    expect_healed_beside_a_hanging_reload(case, go_on)


def test_stale_timeouts_of_a_dead_front_are_ignored(case: Case) -> None:
    case.scrapes(5)
    case.dead = {"enc"}
    case.scrapes(5)
    case.settle()
    case.timeouts = {"enc_w00": 5}
    case.scrapes(5)
    case.settle()
    assert {name for _, name, _ in case.server.calls} == {"enc"}


def test_unavailable_metrics_are_logged_once_and_kill_nothing(case: Case) -> None:
    case.scrapes(5)
    case.down = True
    case.scrapes(50)
    case.down = False
    case.scrapes(5)
    case.settle()
    assert case.server.calls == []
    assert case.logged("no metrics") == 1
    assert case.logged("metrics server: answers again") == 1


def test_a_reload_is_retried_while_the_server_does_not_answer(case: Case) -> None:
    case.scrapes(5)
    case.dead = {"enc_w01"}
    case.server.down = True
    case.scrapes(5)
    case.server.down = False
    case.scrapes(1)
    case.settle()
    assert case.server.calls == [("load", "enc_w01", "512")]
    assert case.logged("dead, but it cannot be reloaded") == 1


def test_a_frozen_reload_is_logged_once(case: Case) -> None:
    case.scrapes(5)
    case.blocked, case.dead = "frozen", {"enc_w01"}
    for _ in range(20):
        case.scrapes(1)
        case.settle()
    assert case.server.calls == []
    assert case.logged("would be reloaded (frozen)") == 1
    case.blocked = ""
    case.scrapes(20)
    case.settle()
    assert case.server.calls == [("load", "enc_w01", "512")]


def test_without_heartbeats_nothing_is_reloaded(case: Case) -> None:
    case.pids = {}
    case.loop.expected = frozenset({"enc", "enc_w00"})
    case.scrapes(50)
    case.settle()
    assert case.server.calls == []


def test_a_loaded_model_without_a_heartbeat_is_reloaded(case: Case) -> None:
    del case.pids["enc_w00"]
    case.loop.expected = frozenset({"enc", "enc_w00", "enc_w01"})
    case.scrapes(12)
    case.settle()
    assert case.server.calls == [("load", "enc_w00", "512")]


def test_a_process_that_ends_is_reloaded_without_another_scrape(case: Case, stubs: Stubs) -> None:
    process = stubs.start("enc_w01_0_0")
    case.pids["enc_w01"] = process.pid
    case.scrapes(3)
    beats = case.beats

    def close(name: str, bin_: str) -> None:
        case.loop.close()

    case.server.fails = close
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    # Ends early, by the close.
    case.loop.wait(60.0)
    killer.join()
    case.settle()
    assert case.beats == beats
    assert case.server.calls == [("load", "enc_w01", "512")]
    assert case.logged(f"enc_w01: process {process.pid} has ended: reloading") == 1


def test_a_process_that_ends_after_its_reload_is_not_reloaded(case: Case, stubs: Stubs) -> None:
    old = stubs.start("enc_w01_0_0")
    case.pids["enc_w01"] = old.pid
    case.scrapes(3)
    new = stubs.start("enc_w01_0_0")
    old.kill()
    case.loop.wait(0.2)
    case.pids["enc_w01"] = new.pid
    case.scrapes(20)
    case.settle()
    assert case.server.calls == []


def test_a_model_that_was_unloaded_is_not_reloaded_when_its_process_ends(case: Case, stubs: Stubs) -> None:
    process = stubs.start("enc_w01_0_0")
    case.pids["enc_w01"] = process.pid
    case.scrapes(3)
    case.server.unload("enc_w01")
    case.server.calls.clear()
    process.kill()
    case.loop.wait(0.2)
    case.settle()
    assert case.server.calls == []


def test_close_ends_the_wait(case: Case) -> None:
    closer = threading.Timer(0.05, case.loop.close)
    closer.start()
    case.loop.wait(60.0)
    closer.join()


def test_a_process_with_a_stalled_thread_is_replaced_and_killed(case: Case, stubs: Stubs) -> None:
    hung = stubs.start("enc_w01_0_0")
    case.pids["enc_w01"] = hung.pid
    case.scrapes(3)
    for seconds in (0.0, 0.0, 6.0):
        case.stalled = {"enc_w01": {"execute": seconds}}
        assert case.server.calls == []
        case.scrapes(1)
    case.settle()
    assert case.server.calls == [("load", "enc_w01", "512")]
    text = f"thread execute of process {hung.pid} has work and has done no step for 6 s"
    assert case.logged(f"enc_w01: {text}: reloading") == 1
    assert case.logged(f"enc_w01: killed the old process {hung.pid}") == 1
    assert hung.wait(120) == -signal.SIGKILL


def test_a_stalled_process_lives_on_when_it_cannot_be_replaced(case: Case, stubs: Stubs) -> None:
    hung = stubs.start("enc_w01_0_0")
    case.pids["enc_w01"] = hung.pid
    case.server.fails = lambda name, bin_: "no memory"
    case.scrapes(3)
    for seconds in (6.0, 7.0):
        case.stalled = {"enc_w01": {"execute": seconds}}
        case.scrapes(1)
    case.settle()
    assert case.logged("enc_w01: not loaded: no memory") == 1
    assert hung.poll() is None


def test_recorded_pages_lead_to_one_load(case: Case) -> None:
    """enc_w01 was killed after the fourth page."""
    pages = iter([(PAGES / f"second_{second:02d}.txt").read_text() for second in range(7)])
    scrape: Callable[[], Samples] = lambda: metrics.parse(next(pages))  # noqa: E731
    journal = Journal(logger(case.log), lambda values: None, {})
    fleet = single(case.server, scrape)
    case.loop = HealthLoop(fleet.scrape, fleet.control, case.actuator, journal, ProcessTracker(local=True))
    case.scrapes(7)
    case.settle()
    assert case.server.calls == [("load", "enc_w01", "512")]
