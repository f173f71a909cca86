"""The health loop against a server in memory and pages made by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shapeshift.errors import ShapeshiftError
from shapeshift.scheduler.actuate import Actuator
from shapeshift.scheduler.journal import Journal
from shapeshift.scheduler.sight import Sight
from shapeshift.scheduler.watch import Watch
from shapeshift.triton import metrics
from shapeshift.triton.metrics import Samples
from tests.scheduler.fakes import FakeServer, samples

PAGES = Path(__file__).parent / "pages"
# No process has this number.
NOBODY = 4_194_304


class Ward:
    """A front and two workers that are loaded, and a watch over them; `pids` and `timeouts` make its pages."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.server.add_front()
        for worker in ("enc_w00", "enc_w01"):
            self.server.load(worker)
        self.server.calls.clear()
        self.pids = {"enc": NOBODY, "enc_w00": NOBODY + 1, "enc_w01": NOBODY + 2}
        self.dead: set[str] = set()
        self.timeouts: dict[str, float] = {}
        self.beats = 0.0
        self.stopped: dict[str, float] = {}
        self.down = False
        self.said: list[str] = []
        self.held = ""
        journal = Journal(self.said.append, lambda values: None, {})
        self.actuator = Actuator(self.server, (), journal, lambda: self.held, 300.0)
        self.watch = Watch(self.scrape, self.server, self.actuator, journal, Sight(local=True))

    def scrape(self) -> Samples:
        if self.down:
            raise ShapeshiftError("no metrics; is the server running?")
        self.beats += 1
        found: Samples = {}
        for model, pid in self.pids.items():
            beats = self.stopped.setdefault(model, self.beats) if model in self.dead else self.beats
            more = {"timeouts": self.timeouts} if model == "enc" else {}
            found |= samples(model, pid, beats, **more)
        return found

    def looks(self, scrapes: int) -> None:
        for _ in range(scrapes):
            self.watch.step()

    def settle(self) -> None:
        """Wait for the loads that were begun."""
        deadline = time.monotonic() + 20
        while self.watch._pending:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def says(self, text: str) -> int:
        return sum(text in line for line in self.said)


@pytest.fixture
def ward() -> Ward:
    return Ward()


def test_a_worker_that_died_is_loaded_again(ward: Ward) -> None:
    ward.looks(5)
    ward.dead = {"enc_w01"}
    # The first page still shows a movement; it and the two after it are the three that look alike.
    ward.looks(2)
    ward.settle()
    assert ward.server.calls == []
    ward.looks(1)
    ward.settle()
    assert ward.server.calls == [("load", "enc_w01", "512")]
    assert ward.server.parameter("enc_w01", "generation") == "1"
    assert ward.says("process 4194306 is gone, its heartbeat stands still: loading it again") == 1


def test_front_and_workers_that_die_at_once_are_all_loaded_again(ward: Ward) -> None:
    ward.looks(5)
    ward.dead = {"enc", "enc_w00", "enc_w01"}
    ward.looks(3)
    ward.settle()
    assert sorted(name for _, name, _ in ward.server.calls) == ["enc", "enc_w00", "enc_w01"]


def test_a_load_that_hangs_holds_up_no_other(ward: Ward) -> None:
    go_on = threading.Event()

    def slowly(name: str, bin_: str) -> None:
        assert name != "enc_w00" or go_on.wait(20)

    ward.server.fails = slowly
    ward.looks(5)
    ward.dead = {"enc_w00"}
    ward.looks(4)
    ward.dead = {"enc_w00", "enc_w01"}
    deadline = time.monotonic() + 20
    while ("load", "enc_w01", "512") not in ward.server.calls:
        assert time.monotonic() < deadline
        ward.looks(1)
        time.sleep(0.005)
    assert "enc_w00" in ward.actuator.busy
    go_on.set()
    ward.settle()


def test_a_model_that_was_unloaded_stays_so(ward: Ward) -> None:
    ward.looks(5)
    ward.dead = {"enc_w01"}
    ward.server.unload("enc_w01")
    ward.server.calls.clear()
    ward.looks(50)
    ward.settle()
    assert ward.server.calls == []


def test_workers_that_time_out_are_loaded_again_one_at_a_time(ward: Ward) -> None:
    go_on = threading.Event()

    def slowly(name: str, bin_: str) -> None:
        assert go_on.wait(20)

    ward.server.fails = slowly
    ward.looks(5)
    ward.timeouts = {"enc_w00": 2, "enc_w01": 3}
    ward.looks(5)
    assert len(ward.watch._pending) == 1
    go_on.set()
    ward.settle()
    ward.looks(1)
    ward.settle()
    assert sorted(name for _, name, _ in ward.server.calls) == ["enc_w00", "enc_w01"]
    # The front has not asked them since, so the same numbers say nothing.
    ward.looks(50)
    ward.settle()
    assert len(ward.server.calls) == 2


def test_time_outs_that_a_dead_front_left_on_the_page_are_ignored(ward: Ward) -> None:
    ward.looks(5)
    ward.dead = {"enc"}
    ward.looks(5)
    ward.settle()
    ward.timeouts = {"enc_w00": 5}
    ward.looks(5)
    ward.settle()
    assert {name for _, name, _ in ward.server.calls} == {"enc"}


def test_metrics_that_do_not_answer_are_said_once_and_prove_nothing(ward: Ward) -> None:
    ward.looks(5)
    ward.down = True
    ward.looks(50)
    ward.down = False
    ward.looks(5)
    ward.settle()
    assert ward.server.calls == []
    assert ward.says("no metrics") == 1
    assert ward.says("metrics server: answers again") == 1


def test_a_server_that_does_not_answer_is_tried_again(ward: Ward) -> None:
    ward.looks(5)
    ward.dead = {"enc_w01"}
    ward.server.down = True
    ward.looks(5)
    ward.server.down = False
    ward.looks(1)
    ward.settle()
    assert ward.server.calls == [("load", "enc_w01", "512")]
    assert ward.says("dead, but nothing can be done") == 1


def test_nothing_is_done_while_frozen_and_said_once(ward: Ward) -> None:
    ward.looks(5)
    ward.held, ward.dead = "frozen", {"enc_w01"}
    for _ in range(20):
        ward.looks(1)
        ward.settle()
    assert ward.server.calls == []
    assert ward.says("would be loaded again (frozen)") == 1
    ward.held = ""
    ward.looks(20)
    ward.settle()
    assert ward.server.calls == [("load", "enc_w01", "512")]


def test_a_server_without_metrics_of_backends_is_left_alone(ward: Ward) -> None:
    ward.pids = {}
    ward.watch.expected = frozenset({"enc", "enc_w00"})
    ward.looks(50)
    ward.settle()
    assert ward.server.calls == []


def test_a_loaded_model_that_never_beats(ward: Ward) -> None:
    del ward.pids["enc_w00"]
    ward.watch.expected = frozenset({"enc", "enc_w00", "enc_w01"})
    ward.looks(12)
    ward.settle()
    assert ward.server.calls == [("load", "enc_w00", "512")]


def test_recorded_pages_lead_to_one_load(ward: Ward) -> None:
    """enc_w01 was killed after the fourth of them."""
    pages = iter([(PAGES / f"second_{second:02d}.txt").read_text() for second in range(7)])
    scrape: Callable[[], Samples] = lambda: metrics.parse(next(pages))  # noqa: E731
    journal = Journal(ward.said.append, lambda values: None, {})
    ward.watch = Watch(scrape, ward.server, ward.actuator, journal, Sight(local=True))
    ward.looks(7)
    ward.settle()
    assert ward.server.calls == [("load", "enc_w01", "512")]
