"""The plan loop: which workers there are and which bins they hold, in each period and after each fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shapeshift.errors import ShapeshiftError
from shapeshift.scheduler import decide, observe, plan, sharing
from shapeshift.scheduler.actuate import Actuator
from shapeshift.scheduler.decide import Decision
from shapeshift.scheduler.fleet import Fleet, FleetReader, Worker
from shapeshift.scheduler.front import ALL, Front
from shapeshift.scheduler.journal import Journal
from shapeshift.scheduler.moves import Action, batches
from shapeshift.scheduler.observe import Page
from shapeshift.scheduler.scale import is_below, scale
from shapeshift.scheduler.settings import SchedulerSettings


@dataclass
class _State:
    """One front: the bin that each worker should hold, and the scrapes from which it is observed.

    `is_new` until it has been planned for beside the others of its pool.
    """

    wanted: dict[str, int] = field(default_factory=dict)
    is_new: bool = True
    plan_page: Page | None = None
    scale_page: Page | None = None
    below_since: float | None = None


class Steer:
    """One thread calls `step`. `page` answers with the last scrape, or None before the first."""

    def __init__(
        self,
        settings: SchedulerSettings,
        reader: FleetReader,
        actuator: Actuator,
        journal: Journal,
        page: Callable[[], Page | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._reader = reader
        self._actuator = actuator
        self._journal = journal
        self._page = page
        self._clock = clock
        self._fronts: dict[str, _State] = {}
        self._lost = False

    def step(self) -> frozenset[str] | None:
        """Look at the fleet once and do what is due.

        Returns the models that are loaded and should have a heartbeat; None where no server answers.
        """
        page = self._page()
        if any(self._plan_is_due(state, page) for state in self._fronts.values()):
            # What is loaded is the truth; nothing of it is remembered from one period to the next.
            self._reader.forget()
        try:
            fleet = self._reader.read()
        except ShapeshiftError as error:
            self._journal.say("server", "server", str(error))
            self._lost = True
            return None
        if self._journal.forget("server", "server"):
            self._journal.event("server", "server", "answers again")
        for model, problem in fleet.problems.items():
            self._journal.say("config", model, problem)
        for group in sharing.groups(fleet.fronts.values()):
            # What has acted leaves the rest to the next step, which sees what came of it.
            if not self._begin(group, fleet) and not self._restore(group, fleet):
                self._go_on(group, fleet, page)
        self._lost = False
        ready = [worker.name for workers in fleet.workers.values() for worker in workers if worker.is_ready]
        return frozenset([*fleet.fronts, *ready])

    def _begin(self, group: Sequence[Front], fleet: Fleet) -> bool:
        """Take over fronts that are new: go on with what is loaded, or load their first plan. Whether any was."""
        fresh = [front for front in group if front.name not in self._fronts]
        loaded = {front.name: _bins(fleet.workers[front.name]) for front in group}
        begun = False
        shares = sharing.first_shares(group, fleet)
        for front in fresh:
            have, spare = loaded[front.name], sharing.spare(front, group, fleet)
            workers, problem = decide.room(front, shares[front.name], len(fleet.workers[front.name]))
            if problem:
                self._journal.say("config", front.name, problem)
            decision = Decision((), (), "goes on with what is loaded")
            if not have and workers and not (len(group) > 1 and any(loaded.values())):
                decision = decide.first(front, workers, spare, self._settings)
            elif 0 < len(have) < min(front.least, workers):
                decision = decide.complete(front, have, min(front.least, workers), spare, self._settings)
            if not self._may(front, decision):
                continue
            begun = True
            state = self._fronts[front.name] = _State(dict(have))
            # Also those that could not be loaded: they are tried again.
            state.wanted |= {action.worker: action.bin for action in decision.actions}
            if not decision.counts:
                counts = plan.counts_of(front, have) if front.is_binned else (len(have),)
                decision = Decision((), counts, decision.reason)
            self._carry(front, decision, self._settings.start_batch, keep_going=True)
            state.plan_page = state.scale_page = self._page()
        return begun

    def _restore(self, group: Sequence[Front], fleet: Fleet) -> bool:
        """Load what should be loaded and is not, as after a restart of the server. Whether anything was done."""
        known = [front for front in group if front.name in self._fronts]
        done = [self._restore_one(front, self._fronts[front.name], fleet.workers[front.name]) for front in known]
        return any(done)

    def _restore_one(self, front: Front, state: _State, models: Sequence[Worker]) -> bool:
        workers = {worker.name: worker for worker in models}
        for worker in workers.values():
            if worker.is_ready:
                state.wanted.setdefault(worker.name, worker.bin)
        actions = []
        for name, bin_ in state.wanted.items():
            wanted = plan.fitting(front, bin_) if front.is_binned else ALL
            if name not in workers:
                self._journal.say("config", name, "there is no such worker model any more; run `make engines`")
            elif workers[name].is_at_rest and not self._actuator.backoff.wait_s(name, self._clock()):
                actions.append(Action("load", name, wanted))
            elif self._lost and workers[name].is_ready and workers[name].bin != wanted:
                actions.append(Action("change", name, wanted, workers[name].bin))
        if not actions:
            return False
        text = f"{len(actions)} of {len(state.wanted)} workers are not as planned: {_listed(actions)}"
        if held := self._actuator.held:
            self._journal.say("state", front.name, f"{text} ({held}: nothing is done)")
            return False
        self._journal.event("state", front.name, text)
        serving = any(worker.is_ready for worker in workers.values())
        size = self._settings.batch_of(len(state.wanted)) if serving else self._settings.start_batch
        self._actuator.carry_out(batches(actions, size), keep_going=True, heals=True)
        self._reader.forget(*(action.worker for action in actions))
        return True

    def _go_on(self, group: Sequence[Front], fleet: Fleet, page: Page | None) -> None:
        """Plan where a period is over; else scale where it is time for that."""
        fronts = [front for front in group if front.name in self._fronts]
        if page is None or not fronts:
            return
        for front in fronts:
            state = self._fronts[front.name]
            state.plan_page = state.plan_page or page
            state.scale_page = state.scale_page or page
        states = [self._fronts[front.name] for front in fronts]
        starved = len(fronts) > 1 and any(state.is_new and not state.wanted for state in states)
        if starved or any(self._plan_is_due(state, page) for state in states):
            self._plan(fronts, fleet, page)
        else:
            for front in fronts:
                self._scale(front, fleet, page)

    def _plan(self, fronts: Sequence[Front], fleet: Fleet, page: Page) -> None:
        members = []
        for front in fronts:
            state = self._fronts[front.name]
            assert state.plan_page is not None
            loaded = _bins(fleet.workers[front.name])
            state.wanted = {name: loaded.get(name, bin_) for name, bin_ in state.wanted.items()}
            load = observe.load(front.name, state.plan_page, page)
            spare = sharing.spare(front, fronts, fleet)
            members.append(sharing.Member(front, state.wanted, spare, load, len(fleet.workers[front.name])))
        shared = bool(fronts[0].settings.worker_pool)
        for front, decision in sharing.decide_all(members, self._settings):
            size = self._settings.batch_of(len(self._fronts[front.name].wanted))
            if self._may(front, decision):
                self._carry(front, decision, size, release_first=shared)
            self._fronts[front.name].plan_page = self._page()
            self._fronts[front.name].is_new = False

    def _scale(self, front: Front, fleet: Fleet, page: Page) -> None:
        state = self._fronts[front.name]
        before = state.scale_page
        if not front.scales or before is None or page.at - before.at < self._settings.scale_period_s:
            return
        state.scale_page = page
        load = observe.load(front.name, before, page)
        if not is_below(front, load):
            state.below_since = None
        elif state.below_since is None:
            state.below_since = before.at
        below_s = 0.0 if state.below_since is None else page.at - state.below_since
        alive = {worker for worker in state.wanted if observe.beats_between(worker, before, page)}
        spare = sharing.spare(front, [front], fleet)
        action, reason = scale(front, load, below_s, state.wanted, spare, alive)
        if action is None:
            if not reason.startswith("p98"):
                self._journal.say("scale", front.name, reason)
            return
        text = f"{reason}: {action}"
        if held := self._actuator.held:
            self._journal.say("scale", front.name, f"{text} ({held}: nothing is done)")
            return
        self._journal.event("scale", front.name, text)
        self._record(front, self._actuator.carry_out([[action]]).done)
        state.scale_page, state.below_since = self._page(), None

    def _may(self, front: Front, decision: Decision) -> bool:
        """Whether the decision may be carried out; if not, it is only told."""
        held = self._actuator.held
        if not held or not decision.actions:
            return True
        self._journal.say(
            "plan", front.name, f"{decision.reason}: {_listed(decision.actions)} ({held}: nothing is done)"
        )
        return False

    def _carry(
        self, front: Front, decision: Decision, size: int, keep_going: bool = False, release_first: bool = False
    ) -> None:
        self._journal.event("plan", front.name, f"{decision.reason}: {_listed(decision.actions)}")
        self._journal.plan(front.name, sharing.described(front, decision))
        if not decision.actions:
            return
        outcome = self._actuator.carry_out(
            batches(decision.actions, size, release_first), keep_going, await_unloads=release_first
        )
        self._record(front, outcome.done)
        if outcome.failed:
            stays = "the others are loaded" if keep_going else "the last good plan stays"
            self._journal.event("plan", front.name, f"{stays}: {outcome.failed}")

    def _record(self, front: Front, done: Iterable[Action]) -> None:
        state = self._fronts[front.name]
        for action in done:
            if action.kind == "unload":
                state.wanted.pop(action.worker, None)
            else:
                state.wanted[action.worker] = action.bin
            self._reader.forget(action.worker)

    def _plan_is_due(self, state: _State, page: Page | None) -> bool:
        period = self._settings.plan_period_s
        return page is not None and state.plan_page is not None and page.at - state.plan_page.at >= period


def _bins(workers: Iterable[Worker]) -> dict[str, int]:
    return {worker.name: worker.bin for worker in workers if worker.is_ready}


def _listed(actions: Sequence[Action]) -> str:
    return ", ".join(map(str, actions)) or "nothing changes"
