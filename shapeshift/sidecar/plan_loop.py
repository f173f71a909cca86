"""The plan loop: how many workers there are and which bins they hold, in each period and after each fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar import observe
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.front_config import ALL_BINS, Front
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.policy import decide, plan, pools
from shapeshift.sidecar.policy.decide import Decision
from shapeshift.sidecar.policy.moves import Action, batches
from shapeshift.sidecar.policy.pools import FrontPeriod
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.sidecar.workers import ServerModelReader, ServerModels, Worker


@dataclass
class _FrontState:
    """One front. target: the bin that each worker should hold; plan_page, scale_page: start of the present periods.

    is_new: the front has not been planned for yet together with the other fronts of its pool.
    """

    target: dict[str, int] = field(default_factory=dict)
    is_new: bool = True
    plan_page: MetricsPage | None = None
    scale_page: MetricsPage | None = None
    fast_since: float | None = None


class PlanLoop:
    """One thread calls `step`. `page` returns the last scrape, or None before the first."""

    def __init__(
        self,
        settings: SidecarSettings,
        reader: ServerModelReader,
        actuator: Actuator,
        journal: Journal,
        page: Callable[[], MetricsPage | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._reader = reader
        self._actuator = actuator
        self._journal = journal
        self._page = page
        self._clock = clock
        self._fronts: dict[str, _FrontState] = {}
        self._server_was_down = False

    def step(self) -> frozenset[str] | None:
        """Read the server's models once and do what is due.

        Returns the models that are loaded and should have a heartbeat; None if no server answers.
        """
        page = self._page()
        if any(self._plan_is_due(state, page) for state in self._fronts.values()):
            # Plans start from the configurations that are loaded now, not from cached ones.
            self._reader.forget()
        try:
            server = self._reader.read()
        except ShapeshiftError as error:
            self._journal.log_once("server", "server", str(error))
            self._server_was_down = True
            return None
        if self._journal.clear("server", "server"):
            self._journal.log("server", "server", "answers again")
        for model, problem in server.problems.items():
            self._journal.log_once("config", model, problem)
        for group in pools.group_fronts(server.fronts.values()):
            # At most one of these per step: the next step reads the result.
            if not self._adopt(group, server) and not self._restore(group, server):
                self._plan_or_scale(group, server, page)
        self._server_was_down = False
        ready = [worker.name for workers in server.workers.values() for worker in workers if worker.is_ready]
        return frozenset([*server.fronts, *ready])

    def _adopt(self, group: Sequence[Front], server: ServerModels) -> bool:
        """Take over new fronts: keep the workers that are loaded, or load the first plan. Whether there was any."""
        new = [front for front in group if front.name not in self._fronts]
        loaded = {front.name: _bins(server.workers[front.name]) for front in group}
        adopted = False
        shares = pools.initial_shares(group, server)
        for front in new:
            current, spare = loaded[front.name], pools.spare_workers(front, group, server)
            workers, problem = pools.within_limits(front, shares[front.name], len(server.workers[front.name]))
            if problem:
                self._journal.log_once("config", front.name, problem)
            decision = Decision((), (), "keeps the loaded workers")
            if not current and workers and not (len(group) > 1 and any(loaded.values())):
                decision = decide.first_plan(front, workers, spare, self._settings)
            elif 0 < len(current) < min(front.min_workers, workers):
                decision = decide.complete_plan(front, current, min(front.min_workers, workers), spare, self._settings)
            if not self._is_allowed(front, decision):
                continue
            adopted = True
            state = self._fronts[front.name] = _FrontState(dict(current))
            # Including workers whose load fails: `_restore` tries them again.
            state.target |= {action.worker: action.bin for action in decision.actions}
            if not decision.counts:
                counts = plan.counts_of(front, current) if front.is_binned else (len(current),)
                decision = Decision((), counts, decision.reason)
            self._apply(front, decision, self._settings.start_batch, keep_going=True)
            state.plan_page = state.scale_page = self._page()
        return adopted

    def _restore(self, group: Sequence[Front], server: ServerModels) -> bool:
        """Load workers that should be loaded and are not, e.g. after a server restart. Whether anything was done."""
        adopted = [front for front in group if front.name in self._fronts]
        done = [self._restore_front(front, self._fronts[front.name], server.workers[front.name]) for front in adopted]
        return any(done)

    def _restore_front(self, front: Front, state: _FrontState, models: Sequence[Worker]) -> bool:
        workers = {worker.name: worker for worker in models}
        for worker in workers.values():
            if worker.is_ready:
                state.target.setdefault(worker.name, worker.bin)
        actions = []
        for name, bin_ in state.target.items():
            target = plan.fitting_bin(front, bin_) if front.is_binned else ALL_BINS
            if name not in workers:
                self._journal.log_once("config", name, "this worker model no longer exists; run `shapeshift engines`")
            elif workers[name].is_unloaded and not self._actuator.backoff.wait_s(name, self._clock()):
                actions.append(Action("load", name, target))
            elif self._server_was_down and workers[name].is_ready and workers[name].bin != target:
                actions.append(Action("change", name, target, workers[name].bin))
        if not actions:
            return False
        text = f"{len(actions)} of {len(state.target)} workers are not as planned: {_format(actions)}"
        if blocked := self._actuator.blocked:
            self._journal.log_once("state", front.name, f"{text} ({blocked}: not applied)")
            return False
        self._journal.log("state", front.name, text)
        serving = any(worker.is_ready for worker in workers.values())
        size = self._settings.batch_size(len(state.target)) if serving else self._settings.start_batch
        self._actuator.apply(batches(actions, size), keep_going=True, new_process=True)
        self._reader.forget(*(action.worker for action in actions))
        return True

    def _plan_or_scale(self, group: Sequence[Front], server: ServerModels, page: MetricsPage | None) -> None:
        """Plan if a period is over; otherwise scale each front whose scaling period is over."""
        fronts = [front for front in group if front.name in self._fronts]
        if page is None or not fronts:
            return
        for front in fronts:
            state = self._fronts[front.name]
            state.plan_page = state.plan_page or page
            state.scale_page = state.scale_page or page
        states = [self._fronts[front.name] for front in fronts]
        starved = len(fronts) > 1 and any(state.is_new and not state.target for state in states)
        if starved or any(self._plan_is_due(state, page) for state in states):
            self._plan(fronts, server, page)
        else:
            for front in fronts:
                self._scale(front, server, page)

    def _plan(self, fronts: Sequence[Front], server: ServerModels, page: MetricsPage) -> None:
        periods = []
        for front in fronts:
            state = self._fronts[front.name]
            assert state.plan_page is not None
            loaded = _bins(server.workers[front.name])
            state.target = {name: loaded.get(name, bin_) for name, bin_ in state.target.items()}
            traffic = observe.traffic_of(front.name, state.plan_page, page)
            spare = pools.spare_workers(front, fronts, server)
            periods.append(FrontPeriod(front, state.target, spare, traffic, len(server.workers[front.name])))
        pooled = bool(fronts[0].settings.worker_pool)
        for front, decision in decide.decide_group(periods, self._settings):
            state = self._fronts[front.name]
            size = self._settings.batch_size(len(state.target))
            if self._is_allowed(front, decision):
                self._apply(front, decision, size, release_first=pooled)
            state.plan_page = self._page()
            state.is_new = False

    def _scale(self, front: Front, server: ServerModels, page: MetricsPage) -> None:
        state = self._fronts[front.name]
        before = state.scale_page
        if not front.is_scaled or before is None or page.at - before.at < self._settings.scale_period_s:
            return
        state.scale_page = page
        traffic = observe.traffic_of(front.name, before, page)
        if not decide.is_fast(front, traffic):
            state.fast_since = None
        elif state.fast_since is None:
            state.fast_since = before.at
        fast_since_s = 0.0 if state.fast_since is None else page.at - state.fast_since
        alive = {worker for worker in state.target if observe.was_alive(worker, before, page)}
        spare = pools.spare_workers(front, [front], server)
        action, reason = decide.decide_scaling(front, traffic, fast_since_s, state.target, spare, alive)
        if action is None:
            if not reason.startswith("p98"):
                self._journal.log_once("scale", front.name, reason)
            return
        text = f"{reason}: {action}"
        if blocked := self._actuator.blocked:
            self._journal.log_once("scale", front.name, f"{text} ({blocked}: not applied)")
            return
        self._journal.log("scale", front.name, text)
        self._record(front, self._actuator.apply([[action]]).done)
        state.scale_page, state.fast_since = self._page(), None

    def _is_allowed(self, front: Front, decision: Decision) -> bool:
        """Whether the decision may be applied; otherwise it is only logged."""
        blocked = self._actuator.blocked
        if not blocked or not decision.actions:
            return True
        text = f"{decision.reason}: {_format(decision.actions)} ({blocked}: not applied)"
        self._journal.log_once("plan", front.name, text)
        return False

    def _apply(
        self, front: Front, decision: Decision, size: int, keep_going: bool = False, release_first: bool = False
    ) -> None:
        self._journal.log("plan", front.name, f"{decision.reason}: {_format(decision.actions)}")
        self._journal.record_plan(front.name, decide.report_entry(front, decision))
        if not decision.actions:
            return
        outcome = self._actuator.apply(
            batches(decision.actions, size, release_first), keep_going, await_unloads=release_first
        )
        self._record(front, outcome.done)
        if outcome.failed:
            kept = "the other workers are loaded" if keep_going else "the last good plan stays"
            self._journal.log("plan", front.name, f"{kept}: {outcome.failed}")

    def _record(self, front: Front, done: Iterable[Action]) -> None:
        state = self._fronts[front.name]
        for action in done:
            if action.kind == "unload":
                state.target.pop(action.worker, None)
            else:
                state.target[action.worker] = action.bin
            self._reader.forget(action.worker)

    def _plan_is_due(self, state: _FrontState, page: MetricsPage | None) -> bool:
        period = self._settings.plan_period_s
        return page is not None and state.plan_page is not None and page.at - state.plan_page.at >= period


def _bins(workers: Iterable[Worker]) -> dict[str, int]:
    return {worker.name: worker.bin for worker in workers if worker.is_ready}


def _format(actions: Sequence[Action]) -> str:
    return ", ".join(map(str, actions)) or "no change"
