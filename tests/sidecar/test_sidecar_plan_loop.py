"""The plan loop with a fake server."""

from __future__ import annotations

from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.plan_loop import PlanLoop
from shapeshift.sidecar.settings import SidecarSettings
from tests.fakes import logger
from tests.sidecar.fakes import FakeServer, cumulative, page, samples
from tests.sidecar.fleet import single

Lengths = dict[float, float]


class Case:
    """A plan loop with a fake server and a fake clock. `period` lets time pass and makes one step."""

    def __init__(self, server: FakeServer | None = None, **settings: object) -> None:
        self.server = server or FakeServer()
        if server is None:
            self.server.add_front()
        self.settings = SidecarSettings(**settings)  # type: ignore[arg-type]
        self.now = 1000.0
        self.beats = 0.0
        self.totals: dict[str, dict[str, Lengths]] = {}
        self.blocked = ""
        self.begin()

    def begin(self) -> None:
        """Start the plan loop, or replace it by a new one."""
        self.log: list[str] = []
        self.report: dict[str, object] = {}
        journal = Journal(logger(self.log), self.report.update, {})
        fleet = single(self.server)
        actuator = Actuator(fleet.control, (), journal, lambda: self.blocked)
        self.loop = PlanLoop(self.settings, fleet.reader, actuator, journal, self.page, lambda: self.now)
        self.actuator = actuator

    def page(self) -> MetricsPage:
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
        """Let seconds pass in which `lengths` and `latencies` (by upper bound) are counted, then step."""
        self.now += seconds
        self.beats += seconds
        totals = self.totals.setdefault(front, {})
        for name, values in counts.items():
            bounds = {32.0: 0.0, 128.0: 0.0, 512.0: 0.0} if name == "lengths" else {150.0: 0.0, 285.0: 0.0, 300.0: 0.0}
            before = totals.get(name, bounds)
            totals[name] = {bound: count + values.get(bound, 0.0) for bound, count in before.items()}
        self.step()

    def step(self) -> None:
        assert self.loop.step() is not None

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.log)


SHORT = {32.0: 50_000.0, 512.0: 50.0}
LONG = {512.0: 3000.0}


def test_the_first_plan_is_loaded_at_once() -> None:
    case = Case()
    case.step()
    assert len(case.server.bins()) == 4
    assert set(case.server.bins().values()) >= {"32", "512"}
    assert case.logged("plan enc: no traffic yet, by plan_histogram")
    calls = list(case.server.calls)
    case.step()
    assert case.server.calls == calls
    assert case.report["plans"]["enc"]["workers"] == 4  # type: ignore[index]


def test_each_plan_follows_the_last_periods_traffic() -> None:
    case = Case()
    case.step()
    case.step()
    case.period(lengths=LONG)
    assert list(case.server.bins().values()) == ["512"] * 4
    case.period(lengths=SHORT)
    assert sorted(case.server.bins().values()).count("32") >= 2
    bins = case.server.bins()
    case.period(lengths={})
    assert case.server.bins() == bins
    assert case.logged("0 texts in 120 s, fewer than 50: the plan stays")


def test_nothing_is_planned_before_the_period_is_over() -> None:
    case = Case()
    case.step()
    bins = case.server.bins()
    for _ in range(11):
        case.period(10.0, lengths=LONG)
    assert case.server.bins() == bins


def test_a_restarted_sidecar_keeps_the_loaded_workers() -> None:
    case = Case()
    case.step()
    case.period(lengths=LONG)
    bins, calls = case.server.bins(), list(case.server.calls)
    case.begin()
    case.step()
    case.step()
    assert (case.server.bins(), case.server.calls) == (bins, calls)
    assert case.logged("keeps the loaded workers")
    case.period(lengths=SHORT)
    case.period(lengths=SHORT)
    assert case.server.bins() != bins


def test_an_interrupted_first_plan_is_completed() -> None:
    case = Case()
    case.step()
    for worker in ("enc_w01", "enc_w02"):
        del case.server.loaded[worker]
    before = case.server.bins()
    case.begin()
    case.step()
    assert len(case.server.bins()) == 4
    assert case.server.bins().items() >= before.items()


def test_a_restarted_server_gets_its_workers_back() -> None:
    case = Case()
    case.step()
    case.period(lengths=LONG)
    bins = case.server.bins()
    case.server.down = True
    assert case.loop.step() is None
    assert case.loop.step() is None
    assert sum("no server answers" in line for line in case.log) == 1
    case.server.down = False
    case.server.restart()
    case.step()
    assert case.server.bins() == bins
    assert case.logged("server: answers again")
    assert case.logged("4 of 4 workers are not as planned")


def test_a_restarted_server_with_other_bins_gets_the_planned_ones() -> None:
    case = Case()
    case.step()
    bins = case.server.bins()
    case.server.down = True
    case.loop.step()
    case.server.down = False
    for worker in bins:
        case.server.loaded[worker] = case.server.files[worker]
    case.step()
    assert case.server.bins() == bins


def test_a_step_that_loads_workers_again_leaves_the_plan_to_the_next_one() -> None:
    case = Case()
    case.step()
    bins = case.server.bins()
    case.server.restart()
    case.period(lengths=LONG)
    assert case.server.bins() == bins
    case.step()
    assert len(case.server.bins()) == len(bins) and case.server.bins() != bins


def test_a_failing_load_is_retried_with_backoff() -> None:
    case = Case()
    case.server.fails = lambda name, bin_: "broken" if name == "enc_w01" else None
    case.step()
    assert sorted(case.server.bins()) == ["enc_w00", "enc_w02", "enc_w03"]
    assert case.logged("the other workers are loaded: load enc_w01")
    # The actuator uses the real clock, the loop its own.
    attempts = len(case.server.calls)
    case.actuator.backoff.record("enc_w01", case.now)
    for _ in range(5):
        case.step()
    assert len(case.server.calls) == attempts
    case.server.fails = lambda name, bin_: None
    case.period(5.0)
    assert len(case.server.bins()) == 4


def test_a_load_that_fails_keeps_the_last_good_plan() -> None:
    case = Case()
    case.step()
    case.step()
    bins = case.server.bins()
    case.server.fails = lambda name, bin_: "broken" if name != "enc_w02" else None
    case.period(lengths=LONG)
    assert case.server.bins() == bins
    assert case.logged("the last good plan stays: ")
    case.server.fails = lambda name, bin_: None
    case.period(lengths=LONG)
    assert list(case.server.bins().values()) == ["512"] * 4


def test_frozen_decisions_are_logged_and_not_applied() -> None:
    case = Case()
    case.blocked = "frozen"
    case.step()
    case.step()
    assert case.server.calls == []
    assert sum("(frozen: not applied)" in line for line in case.log) == 1
    case.blocked = ""
    case.step()
    bins = case.server.bins()
    assert len(bins) == 4
    case.step()
    case.blocked = "frozen"
    case.period(lengths=LONG)
    assert case.server.bins() == bins
    case.server.restart()
    case.step()
    assert case.server.bins() == {}
    case.blocked = ""
    case.step()
    assert case.server.bins() == bins


def test_fewer_models_than_workers() -> None:
    server = FakeServer()
    server.add_front(models=2)
    case = Case(server)
    case.step()
    assert len(server.bins()) == 2
    assert case.logged("4 workers are needed, but there are only 2 worker models; run `shapeshift engines`")


def test_worker_models_that_appear_later_are_loaded() -> None:
    server = FakeServer()
    server.add_front(models=0)
    case = Case(server)
    case.step()
    assert case.logged("only 0 worker models")
    server.add_front(models=4)
    case.step()
    case.period()
    assert len(server.bins()) == 4


def test_a_worker_model_that_no_longer_exists_is_reported() -> None:
    case = Case()
    case.step()
    del case.server.files["enc_w01"], case.server.loaded["enc_w01"]
    case.step()
    case.step()
    assert sum("this worker model no longer exists" in line for line in case.log) == 1


def test_a_front_with_an_invalid_configuration_is_ignored() -> None:
    server = FakeServer()
    server.add_front("bad", bin_edges="[3, 2]")
    server.add_front("enc")
    case = Case(server)
    case.step()
    assert server.bins("bad") == {}
    assert len(server.bins("enc")) == 4
    assert case.logged("config bad: ignored: bin_edges")


def test_a_worker_of_another_front_is_ignored() -> None:
    case = Case()
    case.server.files["enc_w05"]["parameters"]["worker_of"]["string_value"] = "other"
    case.server.loaded["enc_w05"] = case.server.files["enc_w05"]
    case.step()
    assert len([call for call in case.server.calls if call[1] == "enc_w05"]) == 0
    assert case.logged("worker_of: got 'other'; must be 'enc'")


def test_loading_and_unloading_workers_are_not_changed() -> None:
    case = Case()
    case.step()
    calls = list(case.server.calls)
    case.server.restart()
    for state in ("LOADING", "UNLOADING"):
        case.server.states = {f"enc_w{number:02d}": state for number in range(4)}
        case.step()
        assert case.server.calls == calls


def test_slow_answers_add_workers_and_fast_answers_release_them() -> None:
    server = FakeServer()
    server.add_front(workers=2, min_workers=2, max_workers=4)
    case = Case(server)
    case.step()
    assert len(server.bins()) == 2
    case.step()
    for _ in range(4):
        case.period(10.0, latencies={300.0: 100.0})
    bins = server.bins()
    assert len(bins) == 4
    assert bins["enc_w02"] == bins["enc_w03"] == "512"
    assert case.logged("scale enc: p98 299.7 ms, objective 300 ms, 2 workers: load enc_w02 with 512")
    releases = []
    for second in range(10, 400, 10):
        case.period(10.0, latencies={150.0: 100.0})
        if len(server.bins()) < len(bins):
            bins = server.bins()
            releases.append(second)
    assert len(releases) == 2
    assert releases[0] >= 60
    assert releases[1] - releases[0] >= 60
    assert "512" in server.bins().values()


def test_the_number_of_workers_is_decided_once_a_period_from_what_it_saw() -> None:
    server = FakeServer()
    server.add_front(workers=2, min_workers=2, max_workers=4)
    case = Case(server)
    case.step()
    case.step()
    # The page with which the first period begins.
    case.period(0.0)
    for passed_s, workers in ((9.9, 2), (0.1, 3), (9.9, 3), (0.1, 4)):
        case.period(passed_s, latencies={300.0: 100.0})
        assert len(server.bins()) == workers, passed_s


def test_a_front_that_was_slow_in_between_is_fast_from_then_on_only() -> None:
    server = FakeServer()
    server.add_front(workers=3, min_workers=1, max_workers=3)
    case = Case(server)
    case.step()
    case.step()
    case.period(0.0)
    counts = []
    for bound in [150.0] * 2 + [285.0] + [150.0] * 7:
        case.period(10.0, latencies={bound: 100.0})
        counts.append(len(server.bins()))
    # A minute after the slow period has ended, and not sooner.
    assert counts == [3] * 8 + [2] * 2


def test_inline_fronts_are_not_planned_for() -> None:
    server = FakeServer()
    server.files["encode"] = server.loaded["encode"] = {"parameters": {"placement": {"string_value": "inline"}}}
    case = Case(server)
    assert case.loop.step() == {"encode"}
    assert server.calls == []
    assert case.log == []
