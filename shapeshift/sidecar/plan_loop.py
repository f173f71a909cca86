"""The plan loop: how many workers there are and which bins they hold, in each period and after each fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar import observe
from shapeshift.sidecar.actuate import Actuator
from shapeshift.sidecar.front_config import ALL_BINS, Front
from shapeshift.sidecar.journal import Journal
from shapeshift.sidecar.observe import MetricsPage
from shapeshift.sidecar.policy import decide, plan
from shapeshift.sidecar.policy.decide import Decision, FrontPeriod
from shapeshift.sidecar.policy.front_state import FrontState
from shapeshift.sidecar.policy.moves import Action, at_start, batches, under_load
from shapeshift.sidecar.policy.spare import in_order
from shapeshift.sidecar.servers import ModelReader
from shapeshift.sidecar.settings import SidecarSettings
from shapeshift.sidecar.workers import ServerModels, Worker
from shapeshift.triton.names import split


class PlanLoop:
    """One thread calls `step`. `page` returns the last scrape, or None before the first."""

    def __init__(
        self,
        settings: SidecarSettings,
        reader: ModelReader,
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
        self._fronts: dict[str, FrontState] = {}
        # The nodes that answered the last time.
        self._answered: frozenset[str] = frozenset()
        # The nodes that were gone when the present step began.
        self._gone: frozenset[str] = frozenset()

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
            self._gone = self._reader.gone
        except ShapeshiftError as error:
            self._journal.log_once("server", "server", str(error), logging.WARNING)
            self._answered = frozenset()
            return None
        if self._journal.clear("server", "server"):
            self._journal.log("server", "server", "answers again")
        for model, problem in server.problems.items():
            self._journal.log_once("config", model, problem, logging.WARNING)
        for front in server.fronts.values():
            if front.has_workers:
                self._step_front(front, server, page)
        self._answered = server.nodes
        fronts = [model for front in server.fronts.values() for model in front.models]
        ready = [worker.name for workers in server.workers.values() for worker in workers if worker.is_ready]
        return frozenset([*fronts, *ready])

    def _step_front(self, front: Front, server: ServerModels, page: MetricsPage | None) -> None:
        """At most one of these is done: the next step reads the result."""
        state = self._fronts.get(front.name)
        if state is None:
            # Soon it is known whether the pending nodes are gone: until then, only what exists is kept up.
            if not server.pending:
                self._adopt(front, server)
            return
        state.follow(front, server)
        if not self._restore(front, state, server) and not server.pending and page is not None:
            self._plan_or_scale(front, state, server, page)

    def _adopt(self, front: Front, server: ServerModels) -> None:
        """Take over a new front: keep the workers that are loaded, or load the first plan."""
        models = server.workers[front.name]
        current = _bins(models)
        spare = in_order(_spare(models), current)
        workers, problem = decide.within_limits(front, front.workers, len(models))
        if problem:
            self._journal.log_once("config", front.name, problem, logging.WARNING)
        decision = Decision((), (), "keeps the loaded workers")
        if not current and workers:
            decision = decide.first_plan(front, workers, spare)
        elif 0 < len(current) < min(front.min_workers, workers):
            decision = decide.complete_plan(front, current, min(front.min_workers, workers), spare)
        if not self._is_allowed(front, decision):
            return
        state = self._fronts[front.name] = FrontState(dict(current))
        state.follow(front, server)
        state.replan = ""
        # Including workers whose load fails: `_restore` tries them again.
        state.target |= {action.worker: action.bin for action in decision.actions}
        if not decision.counts:
            counts = plan.counts_of(front, current) if front.is_binned else (len(current),)
            decision = Decision((), counts, decision.reason)
        self._apply(front, decision, at_start(len(front.nodes)), keep_going=True)
        state.plan_page = state.scale_page = self._page()

    def _restore(self, front: Front, state: FrontState, server: ServerModels) -> bool:
        """Load workers that should be loaded and are not, e.g. after a server restart. Whether anything was done."""
        workers = {worker.name: worker for worker in server.workers[front.name]}
        restarted = server.nodes - self._answered
        for worker in workers.values():
            if worker.is_ready:
                state.target.setdefault(worker.name, worker.bin)
        actions = []
        for name, bin_ in state.target.items():
            target = plan.fitting_bin(front, bin_) if front.is_binned else ALL_BINS
            if name not in workers and split(name)[0] not in front.nodes:
                # The node does not answer now, or its front is being loaded again.
                continue
            if name not in workers:
                text = "this worker model no longer exists; run `shapeshift engines`"
                self._journal.log_once("config", name, text, logging.WARNING)
            elif workers[name].is_unloaded and not self._actuator.backoff.wait_s(name, self._clock()):
                actions.append(Action("load", name, target))
            elif split(name)[0] in restarted and workers[name].is_ready and workers[name].bin != target:
                actions.append(Action("change", name, target, workers[name].bin))
        if not actions:
            return False
        text = f"{len(actions)} of {len(state.target)} workers are not as planned: {_format(actions)}"
        if blocked := self._actuator.blocked:
            self._journal.log_once("state", front.name, f"{text} ({blocked}: not applied)")
            return False
        self._journal.log("state", front.name, text)
        serving = any(worker.is_ready for worker in workers.values())
        size = under_load(len(state.target)) if serving else at_start(len(front.nodes))
        self._actuator.apply(batches(actions, size), keep_going=True, new_process=True, interrupted=self._is_outdated)
        self._reader.forget(*(action.worker for action in actions))
        return True

    def _plan_or_scale(self, front: Front, state: FrontState, server: ServerModels, page: MetricsPage) -> None:
        """Plan if a period is over; otherwise scale the front if its scaling period is over."""
        state.plan_page = state.plan_page or page
        state.scale_page = state.scale_page or page
        if state.replan or self._plan_is_due(state, page):
            self._plan(front, state, server, page)
        else:
            self._scale(front, server, page)

    def _plan(self, front: Front, state: FrontState, server: ServerModels, page: MetricsPage) -> None:
        decision = decide.decide_period(self._period(front, server.workers[front.name], page))
        decision = replace(decision, reason="; ".join(filter(None, (state.replan, decision.reason))))
        size = under_load(len(state.target))
        if self._is_allowed(front, decision):
            if state.replan:
                # Including workers whose load fails: `_restore` tries them again.
                state.target |= {action.worker: action.bin for action in decision.actions if action.kind == "load"}
            self._apply(front, decision, size, keep_going=bool(state.replan))
            state.replan = ""
        elif state.replan:
            return
        state.last_plan_page, state.plan_page = state.plan_page, self._page()

    def _period(self, front: Front, models: Sequence[Worker], page: MetricsPage) -> FrontPeriod:
        """What the front has and did since the last plan; since the plan before, if the last one is recent."""
        state = self._fronts[front.name]
        start = state.period_start(page.at, self._settings.plan_period_s)
        assert start is not None
        loaded = _bins(models)
        state.target = {name: loaded.get(name, bin_) for name, bin_ in state.target.items()}
        traffic = observe.traffic_of(state.models(front), start, page)
        return FrontPeriod(front, state.target, _spare(models), traffic, len(models), state.wanted(front))

    def _scale(self, front: Front, server: ServerModels, page: MetricsPage) -> None:
        state = self._fronts[front.name]
        before = state.scale_page
        if not front.is_scaled or before is None or page.at - before.at < decide.SCALE_PERIOD_S:
            return
        state.scale_page = page
        traffic = observe.traffic_of(front.models, before, page)
        if not decide.is_fast(front, traffic):
            state.fast_since = None
        elif state.fast_since is None:
            state.fast_since = before.at
        fast_since_s = 0.0 if state.fast_since is None else page.at - state.fast_since
        alive = {worker for worker in state.target if observe.was_alive(worker, before, page)}
        spare = in_order(_spare(server.workers[front.name]), state.target)
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
        outcome = self._actuator.apply([[action]], interrupted=self._is_outdated)
        self._record(front, (*outcome.done, *outcome.begun))
        state.scale_page, state.fast_since = self._page(), None

    def _is_allowed(self, front: Front, decision: Decision) -> bool:
        """Whether the decision may be applied; otherwise it is only logged."""
        blocked = self._actuator.blocked
        if not blocked or not decision.actions:
            return True
        text = f"{decision.reason}: {_format(decision.actions)} ({blocked}: not applied)"
        self._journal.log_once("plan", front.name, text)
        return False

    def _apply(self, front: Front, decision: Decision, size: int, keep_going: bool = False) -> None:
        self._journal.log("plan", front.name, f"{decision.reason}: {_format(decision.actions)}")
        self._journal.record_plan(front.name, decide.report_entry(front, decision))
        if not decision.actions:
            return
        outcome = self._actuator.apply(batches(decision.actions, size), keep_going, interrupted=self._is_outdated)
        # What is still being loaded counts as loaded: if that fails, `_restore` tries it again.
        self._record(front, (*outcome.done, *outcome.begun))
        if outcome.failed:
            remains = "the other workers are loaded" if keep_going else "the last good plan stays"
            self._journal.log("plan", front.name, f"{remains}: {outcome.failed}", logging.ERROR)

    def _record(self, front: Front, done: Iterable[Action]) -> None:
        state = self._fronts[front.name]
        for action in done:
            if action.kind == "unload":
                state.target.pop(action.worker, None)
            else:
                state.target[action.worker] = action.bin
            self._reader.forget(action.worker)

    def _is_outdated(self) -> bool:
        """Whether a node has gone since the present step began."""
        return bool(self._reader.gone - self._gone)

    def _plan_is_due(self, state: FrontState, page: MetricsPage | None) -> bool:
        period = self._settings.plan_period_s
        return page is not None and state.plan_page is not None and page.at - state.plan_page.at >= period


def _bins(workers: Iterable[Worker]) -> dict[str, int]:
    return {worker.name: worker.bin for worker in workers if worker.is_ready}


def _spare(workers: Iterable[Worker]) -> list[str]:
    return [worker.name for worker in workers if worker.is_unloaded]


def _format(actions: Sequence[Action]) -> str:
    return ", ".join(map(str, actions)) or "no change"
