"""Questions to all nodes at once, such that a slow node holds up no other, and which nodes are gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from shapeshift.errors import ShapeshiftError
from shapeshift.sidecar.journal import Journal

T = TypeVar("T")

# Unanswered questions in a row until a node is gone, and answered ones until it is back.
GONE, BACK = 2, 2
# More nodes than this wait for one another.
_MOST_AT_ONCE = 1024


def nobody_answers(problems: Mapping[str, str]) -> ShapeshiftError:
    """The error where no node answers. problems: by node."""
    texts = [f"{node}: {text}" for node, text in sorted(problems.items())]
    return ShapeshiftError("; ".join(texts) or "the fleet has no nodes")


class NodeCalls(Generic[T]):
    """Calls one function for each node, each in its own thread, one at a time for a node. One thread uses it.

    limit_s: seconds until a node is late. A late answer is dropped, and the node is late until its
    call has ended: whatever it would say may have changed since.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="node")
        self._late: dict[str, Future[T]] = {}

    def ask(self, calls: Mapping[str, Callable[[], T]], patience: float = 1.0) -> tuple[dict[str, T], dict[str, str]]:
        """By node: the answers, and why each of the other nodes gave none. patience: factor on the limit."""
        limit_s = patience * self._limit_s
        self._late = {node: call for node, call in self._late.items() if not call.done()}
        problems = dict.fromkeys(self._late.keys() & calls.keys(), "its last answer is still missing")
        running = {node: self._threads.submit(call) for node, call in calls.items() if node not in problems}
        ended = wait(running.values(), limit_s).done
        answers: dict[str, T] = {}
        for node, call in running.items():
            if call not in ended:
                self._late[node] = call
                problems[node] = f"no answer within {limit_s:g} s"
            elif (error := call.exception()) is not None:
                # Whatever is wrong with one node concerns no other.
                problems[node] = " ".join(str(error).split()) or repr(error)
            else:
                answers[node] = call.result()
        return answers, problems


class Presence:
    """Thread-safe. Several sources ask each node (`metrics`, `models`); a node is present if it answers all of them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lock = threading.Lock()
        # By node and source: answers in a row, negative for missing ones.
        self._streaks: dict[str, dict[str, int]] = {}
        self._gone: frozenset[str] = frozenset()

    @property
    def gone(self) -> frozenset[str]:
        """The nodes that are gone now; nodes that are no longer members are not among them."""
        return self._gone

    def record(self, source: str, answered: Collection[str], problems: Mapping[str, str]) -> None:
        """Take one more question to all members into account: those that answered, and why the others did not."""
        with self._lock:
            members = {*answered, *problems}
            self._streaks = {node: self._streaks.get(node, {}) for node in members}
            for node, streaks in self._streaks.items():
                before = streaks.get(source, 0)
                streaks[source] = max(before, 0) + 1 if node in answered else min(before, 0) - 1
            gone = frozenset(node for node in members if self._is_gone(node))
            left, returned = gone - self._gone, (self._gone & members) - gone
            self._gone = gone
        for node in left:
            text = f"does not answer, and is planned around: {problems.get(node, source)}"
            self._journal.log("node", node, text, logging.WARNING)
        for node in returned:
            self._journal.log("node", node, "answers again")

    def _is_gone(self, node: str) -> bool:
        streaks = self._streaks[node].values()
        if node in self._gone:
            return any(streak < BACK for streak in streaks)
        return any(streak <= -GONE for streak in streaks)
