"""The plan loop against a server in memory."""

from __future__ import annotations

from shapeshift.scheduler.actuate import Actuator
from shapeshift.scheduler.fleet import FleetReader
from shapeshift.scheduler.journal import Journal
from shapeshift.scheduler.observe import Page
from shapeshift.scheduler.settings import SchedulerSettings
from shapeshift.scheduler.steer import Steer
from tests.scheduler.fakes import FakeServer, cumulative, page, samples

Lengths = dict[float, float]


class World:
    """A fake server, a sidecar's plan loop, and a clock: `period` lets time pass and steps."""

    def __init__(self, server: FakeServer | None = None, **settings: object) -> None:
        self.server = server or FakeServer()
        if server is None:
            self.server.add_front()
        self.settings = SchedulerSettings(**settings)  # type: ignore[arg-type]
        self.now = 1000.0
        self.beats = 0.0
        self.totals: dict[str, dict[str, Lengths]] = {}
        self.held = ""
        self.begin()

    def begin(self) -> None:
        """Start the sidecar, or another one in its place."""
        self.said: list[str] = []
        self.report: dict[str, object] = {}
        journal = Journal(self.said.append, self.report.update, {})
        actuator = Actuator(self.server, (), journal, lambda: self.held, 300.0)
        self.steer = Steer(self.settings, FleetReader(self.server), actuator, journal, self.page, lambda: self.now)
        self.actuator = actuator

    def page(self) -> Page:
        parts = []
        for number, model in enumerate(sorted(self.server.loaded)):
            totals = self.totals.get(model, {})
            parts.append(
                samples(
                    model,
                    100 + number,
                    self.beats,
                    lengths=cumulative(totals.get("lengths", {32.0: 0.0, 128.0: 0.0, 512.0: 0.0})),
                    latencies=cumulative(totals.get("latencies", {150.0: 0.0, 285.0: 0.0, 300.0: 0.0})),
                )
            )
        return page(self.now, *parts)

    def period(self, seconds: float = 120.0, front: str = "enc", **counts: Lengths) -> None:
        """So many seconds pass, in which `lengths` and `latencies` come in by upper bound; then one step."""
        self.now += seconds
        self.beats += seconds
        totals = self.totals.setdefault(front, {})
        for name, values in counts.items():
            bounds = {32.0: 0.0, 128.0: 0.0, 512.0: 0.0} if name == "lengths" else {150.0: 0.0, 285.0: 0.0, 300.0: 0.0}
            before = totals.get(name, bounds)
            totals[name] = {bound: count + values.get(bound, 0.0) for bound, count in before.items()}
        self.step()

    def step(self) -> None:
        assert self.steer.step() is not None

    def says(self, text: str) -> bool:
        return any(text in line for line in self.said)


SHORT = {32.0: 50_000.0, 512.0: 50.0}
LONG = {512.0: 3000.0}


def test_the_first_plan_is_loaded_at_once() -> None:
    world = World()
    world.step()
    assert len(world.server.bins()) == 4
    assert set(world.server.bins().values()) >= {"32", "512"}
    assert world.says("plan enc: no traffic yet, by plan_histogram")
    calls = list(world.server.calls)
    world.step()
    assert world.server.calls == calls
    assert world.report["plans"]["enc"]["workers"] == 4  # type: ignore[index]


def test_each_period_is_planned_by_what_came_in() -> None:
    world = World()
    world.step()
    world.step()
    world.period(lengths=LONG)
    assert list(world.server.bins().values()) == ["512"] * 4
    world.period(lengths=SHORT)
    assert sorted(world.server.bins().values()).count("32") >= 2
    bins = world.server.bins()
    world.period(lengths={})
    assert world.server.bins() == bins
    assert world.says("0 texts in 120 s, fewer than 50: the plan stays")


def test_nothing_is_planned_before_the_period_is_over() -> None:
    world = World()
    world.step()
    bins = world.server.bins()
    for _ in range(11):
        world.period(10.0, lengths=LONG)
    assert world.server.bins() == bins


def test_a_sidecar_that_starts_again_goes_on_with_what_is_loaded() -> None:
    world = World()
    world.step()
    world.period(lengths=LONG)
    bins, calls = world.server.bins(), list(world.server.calls)
    world.begin()
    world.step()
    world.step()
    assert (world.server.bins(), world.server.calls) == (bins, calls)
    assert world.says("goes on with what is loaded")
    world.period(lengths=SHORT)
    world.period(lengths=SHORT)
    assert world.server.bins() != bins


def test_a_first_plan_that_was_cut_short_is_filled_up() -> None:
    world = World()
    world.step()
    for worker in ("enc_w01", "enc_w02"):
        del world.server.loaded[worker]
    before = world.server.bins()
    world.begin()
    world.step()
    assert len(world.server.bins()) == 4
    assert world.server.bins().items() >= before.items()


def test_a_server_that_restarts_gets_its_workers_back() -> None:
    world = World()
    world.step()
    world.period(lengths=LONG)
    bins = world.server.bins()
    world.server.down = True
    assert world.steer.step() is None
    assert world.steer.step() is None
    assert sum("no server answers" in line for line in world.said) == 1
    world.server.down = False
    world.server.restart()
    world.step()
    assert world.server.bins() == bins
    assert world.says("server: answers again")
    assert world.says("4 of 4 workers are not as planned")


def test_a_server_that_comes_back_with_other_bins_gets_the_planned_ones() -> None:
    world = World()
    world.step()
    bins = world.server.bins()
    world.server.down = True
    world.steer.step()
    world.server.down = False
    for worker in bins:
        world.server.loaded[worker] = world.server.files[worker]
    world.step()
    assert world.server.bins() == bins


def test_a_worker_that_cannot_be_loaded_is_tried_again_ever_later() -> None:
    world = World()
    world.server.fails = lambda name, bin_: "broken" if name == "enc_w01" else None
    world.step()
    assert sorted(world.server.bins()) == ["enc_w00", "enc_w02", "enc_w03"]
    assert world.says("the others are loaded: load enc_w01")
    # The actuator counts real seconds; the loop asks by its own clock.
    attempts = len(world.server.calls)
    world.actuator.backoff.note("enc_w01", world.now)
    for _ in range(5):
        world.step()
    assert len(world.server.calls) == attempts
    world.server.fails = lambda name, bin_: None
    world.period(5.0)
    assert len(world.server.bins()) == 4


def test_a_load_that_fails_keeps_the_last_good_plan() -> None:
    world = World()
    world.step()
    world.step()
    bins = world.server.bins()
    world.server.fails = lambda name, bin_: "broken" if name != "enc_w02" else None
    world.period(lengths=LONG)
    assert world.server.bins() == bins
    assert world.says("the last good plan stays: ")
    world.server.fails = lambda name, bin_: None
    world.period(lengths=LONG)
    assert list(world.server.bins().values()) == ["512"] * 4


def test_frozen_decisions_are_told_and_not_carried_out() -> None:
    world = World()
    world.held = "frozen"
    world.step()
    world.step()
    assert world.server.calls == []
    assert sum("(frozen: nothing is done)" in line for line in world.said) == 1
    world.held = ""
    world.step()
    bins = world.server.bins()
    assert len(bins) == 4
    world.step()
    world.held = "frozen"
    world.period(lengths=LONG)
    assert world.server.bins() == bins
    world.server.restart()
    world.step()
    assert world.server.bins() == {}
    world.held = ""
    world.step()
    assert world.server.bins() == bins


def test_fewer_models_than_workers() -> None:
    server = FakeServer()
    server.add_front(models=2)
    world = World(server)
    world.step()
    assert len(server.bins()) == 2
    assert world.says("4 workers are wanted, but there are 2 worker models; run `make engines`")


def test_no_worker_models_at_all_and_then_some() -> None:
    server = FakeServer()
    server.add_front(models=0)
    world = World(server)
    world.step()
    assert world.says("0 worker models")
    server.add_front(models=4)
    world.step()
    world.period()
    assert len(server.bins()) == 4


def test_a_worker_model_whose_folder_has_gone() -> None:
    world = World()
    world.step()
    del world.server.files["enc_w01"], world.server.loaded["enc_w01"]
    world.step()
    world.step()
    assert sum("there is no such worker model any more" in line for line in world.said) == 1


def test_a_front_whose_configuration_makes_no_sense_is_left_alone() -> None:
    server = FakeServer()
    server.add_front("bad", bin_edges="[3, 2]")
    server.add_front("enc")
    world = World(server)
    world.step()
    assert server.bins("bad") == {}
    assert len(server.bins("enc")) == 4
    assert world.says("config bad: left alone: bin_edges")


def test_a_worker_of_somebody_else_is_left_alone() -> None:
    world = World()
    world.server.files["enc_w05"]["parameters"]["worker_of"]["string_value"] = "other"
    world.server.loaded["enc_w05"] = world.server.files["enc_w05"]
    world.step()
    assert len([call for call in world.server.calls if call[1] == "enc_w05"]) == 0
    assert world.says("worker_of is other, not enc")


def test_workers_that_are_on_their_way_are_waited_for() -> None:
    world = World()
    world.step()
    calls = list(world.server.calls)
    world.server.restart()
    for state in ("LOADING", "UNLOADING"):
        world.server.states = {f"enc_w{number:02d}": state for number in range(4)}
        world.step()
        assert world.server.calls == calls


def test_slow_answers_add_workers_and_fast_ones_release_them() -> None:
    server = FakeServer()
    server.add_front(workers=2, min_workers=2, max_workers=4)
    world = World(server)
    world.step()
    assert len(server.bins()) == 2
    world.step()
    for _ in range(4):
        world.period(10.0, latencies={300.0: 100.0})
    bins = server.bins()
    assert len(bins) == 4
    assert bins["enc_w02"] == bins["enc_w03"] == "512"
    assert world.says("scale enc: p98 299.7 ms, objective 300 ms, 2 workers: load enc_w02 with 512")
    releases = []
    for second in range(10, 400, 10):
        world.period(10.0, latencies={150.0: 100.0})
        if len(server.bins()) < len(bins):
            bins = server.bins()
            releases.append(second)
    assert len(releases) == 2
    assert releases[0] >= 60
    assert releases[1] - releases[0] >= 60
    assert "512" in server.bins().values()


def test_a_pool_moves_workers_to_the_busy_front() -> None:
    server = FakeServer()
    for name in ("busy", "calm"):
        server.add_front(name, worker_pool="cpu", pool_workers=6, workers=3, min_workers=1, max_workers=6)
    world = World(server)
    world.step()
    assert [len(server.bins(name)) for name in ("busy", "calm")] == [3, 3]
    world.step()
    server.calls.clear()
    world.totals["calm"] = {"lengths": {32.0: 100.0, 128.0: 0.0, 512.0: 0.0}}
    world.period(front="busy", lengths={32.0: 40_000.0, 512.0: 3_500.0})
    shares = [len(server.bins(name)) for name in ("busy", "calm")]
    assert sum(shares) == 6
    assert shares[0] > 3
    kinds = [kind for kind, name, _ in server.calls if name not in {"busy_w00", "busy_w01", "busy_w02"}]
    # The pool never holds more workers than it has.
    assert kinds.index("unload") < kinds.index("load")
    assert world.says("plan busy: pool cpu: ")


def test_inline_fronts_are_not_planned_for() -> None:
    server = FakeServer()
    server.files["encode"] = server.loaded["encode"] = {"parameters": {"placement": {"string_value": "inline"}}}
    world = World(server)
    assert world.steer.step() == {"encode"}
    assert server.calls == []
    assert world.said == []
