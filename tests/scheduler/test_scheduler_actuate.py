"""What is done to the server, and what is not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shapeshift.errors import EngineError
from shapeshift.scheduler.actuate import Actuator
from shapeshift.scheduler.journal import Journal
from shapeshift.scheduler.moves import Action
from tests.scheduler.fakes import FakeServer


class Bench:
    """A fake server with three workers loaded, an actuator, and what it has said."""

    def __init__(self, repositories: tuple[Path, ...] = ()) -> None:
        self.server = FakeServer()
        self.server.add_front()
        self.said: list[str] = []
        self.held = ""
        journal = Journal(self.said.append, lambda values: None, {})
        self.actuator = Actuator(self.server, repositories, journal, lambda: self.held, 300.0)
        loads = [Action("load", f"enc_w{number:02d}", bin_) for number, bin_ in enumerate((32, 128, 512))]
        assert self.actuator.carry_out([loads]).failed == ""
        self.server.calls.clear()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_batches_are_done_one_after_the_other(bench: Bench) -> None:
    assert bench.server.bins() == {"enc_w00": "32", "enc_w01": "128", "enc_w02": "512"}
    batches = [
        [Action("change", "enc_w00", 512, 32)],
        [Action("change", "enc_w01", 32, 128)],
        [Action("unload", "enc_w02", before=512)],
    ]
    outcome = bench.actuator.carry_out(batches)
    assert outcome.failed == ""
    assert list(outcome.done) == [batch[0] for batch in batches]
    assert bench.server.calls == [("load", "enc_w00", "512"), ("load", "enc_w01", "32"), ("unload", "enc_w02", "")]
    assert bench.server.bins() == {"enc_w00": "512", "enc_w01": "32"}
    assert bench.server.parameter("enc_w00", "generation") == "0"


def test_a_load_that_fails_keeps_the_last_good_plan(bench: Bench) -> None:
    bench.server.fails = lambda name, bin_: "no such engine" if (name, bin_) == ("enc_w01", "32") else None
    before = bench.server.bins()
    batches = [
        [Action("change", "enc_w00", 512, 32)],
        [Action("change", "enc_w01", 32, 128)],
        [Action("unload", "enc_w02", before=512)],
    ]
    outcome = bench.actuator.carry_out(batches)
    assert outcome.done == ()
    assert "no such engine" in outcome.failed
    assert bench.server.bins() == before
    assert any("enc_w01 128 -> 32: no such engine" in line for line in bench.said)
    assert bench.actuator.backoff.wait_s("enc_w01", 0.0) > 0


def test_what_cannot_be_put_back_is_told(bench: Bench) -> None:
    bench.server.fails = lambda name, bin_: "broken" if (name, bin_) in {("enc_w01", "32"), ("enc_w00", "32")} else None
    outcome = bench.actuator.carry_out([[Action("change", "enc_w00", 512, 32)], [Action("change", "enc_w01", 32, 128)]])
    assert [action.worker for action in outcome.done] == ["enc_w00"]
    assert bench.server.bins()["enc_w00"] == "512"


def test_the_first_plan_goes_on_after_a_failure(bench: Bench) -> None:
    bench.server.fails = lambda name, bin_: "broken" if name == "enc_w03" else None
    loads = [[Action("load", f"enc_w0{number}", 512)] for number in (3, 4)]
    outcome = bench.actuator.carry_out(loads, keep_going=True)
    assert [action.worker for action in outcome.done] == ["enc_w04"]
    assert "enc_w03" in outcome.failed


def test_a_worker_without_a_folder(bench: Bench) -> None:
    outcome = bench.actuator.carry_out([[Action("load", "enc_w77", 512)]])
    assert "failed to poll" in outcome.failed


def test_healing_raises_the_generation_each_time(bench: Bench) -> None:
    bench.server.fails = lambda name, bin_: "not now"
    assert not bench.actuator.heal("enc_w01", "dead")
    bench.actuator.backoff._attempts.clear()
    bench.server.fails = lambda name, bin_: None
    assert bench.actuator.heal("enc_w01", "dead")
    # One above the attempt that failed: the server would not load again what it was just given.
    assert bench.server.parameter("enc_w01", "generation") == "2"
    assert bench.server.bins()["enc_w01"] == "128"


def test_healing_waits_after_it_did_not_help(bench: Bench) -> None:
    assert bench.actuator.heal("enc_w01", "dead")
    loads = len(bench.server.calls)
    for _ in range(5):
        assert not bench.actuator.heal("enc_w01", "dead")
    assert len(bench.server.calls) == loads
    assert sum("left alone" in line for line in bench.said) == 1


def test_a_front_is_healed_too(bench: Bench) -> None:
    assert bench.actuator.heal("enc", "dead")
    assert bench.server.parameter("enc", "generation") == "1"
    assert bench.server.parameter("enc", "slo_ms") == "300"


@pytest.mark.parametrize("held", ["frozen", "dry run"])
def test_nothing_is_done_while_it_is_held(bench: Bench, held: str) -> None:
    bench.held = held
    before = bench.server.bins()
    assert not bench.actuator.heal("enc_w01", "dead")
    assert bench.actuator.carry_out([[Action("unload", "enc_w01", before=128)]]).failed.endswith(held)
    assert (bench.server.bins(), bench.server.calls) == (before, [])
    assert any(f"dead: would be loaded again ({held})" in line for line in bench.said)


def test_a_plan_that_is_frozen_half_way_stops_there(bench: Bench) -> None:
    def freeze_after(name: str, bin_: str) -> None:
        bench.held = "frozen"

    bench.server.fails = freeze_after
    outcome = bench.actuator.carry_out([[Action("change", "enc_w00", 512, 32)], [Action("change", "enc_w01", 32, 128)]])
    assert [action.worker for action in outcome.done] == ["enc_w00"]
    assert bench.server.bins() == {"enc_w00": "512", "enc_w01": "128", "enc_w02": "512"}


def test_a_model_that_one_thread_loads_is_left_alone_by_the_others(bench: Bench) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(name: str, bin_: str) -> None:
        begun.set()
        assert go_on.wait(20)

    bench.server.fails = slowly
    healing = threading.Thread(target=bench.actuator.heal, args=("enc_w00", "dead"))
    healing.start()
    assert begun.wait(20)
    bench.server.fails = lambda name, bin_: None
    bench.actuator.take_touched()
    assert bench.actuator.take_touched() == bench.actuator.busy == {"enc_w00"}
    assert not bench.actuator.heal("enc_w00", "dead")
    assert "another load" in bench.actuator.carry_out([[Action("change", "enc_w00", 512, 32)]]).failed
    assert bench.actuator.carry_out([[Action("change", "enc_w01", 512, 128)]]).failed == ""
    go_on.set()
    healing.join(20)
    assert bench.actuator.busy == frozenset()
    # Also a load that began and ended between two looks was one.
    assert bench.actuator.take_touched() == {"enc_w00", "enc_w01"}
    assert bench.actuator.take_touched() == frozenset()
    assert bench.server.calls.count(("load", "enc_w00", "32")) == 1


def test_folders_are_read_where_they_are_at_hand(tmp_path: Path) -> None:
    (tmp_path / "enc_w03").mkdir()
    (tmp_path / "enc_w03" / "config.pbtxt").write_text(
        'name: "enc_w03" parameters { key: "bin" value { string_value: "512" } }'
        ' parameters { key: "engines" value { string_value: "../x" } }'
    )
    bench = Bench((tmp_path / "absent", tmp_path))
    assert bench.actuator.carry_out([[Action("load", "enc_w03", 32), Action("load", "enc_w04", 128)]]).failed == ""
    # One load where the folder can be read, two where only the server can.
    assert sorted(bench.server.calls) == [
        ("load", "enc_w03", "32"),
        ("load", "enc_w04", "128"),
        ("load", "enc_w04", "512"),
    ]
    assert bench.server.parameter("enc_w03", "engines") == "../x"


def test_errors_of_the_server_become_one_line(bench: Bench) -> None:
    def fail(name: str, bin_: str) -> None:
        raise EngineError("first line\n\nAt:\n  second line")

    bench.server.fails = fail
    assert bench.actuator.carry_out([[Action("change", "enc_w00", 512, 32)]]).failed.endswith(
        "first line At: second line"
    )
